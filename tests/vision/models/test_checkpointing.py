"""Gradient checkpointing: half of the activations' memory or less, for every family, and for a training by one line."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lightning import Trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import core
from vision.callbacks import GradientCheckpointing
from vision.data import EmbeddedFashionMNIST
from vision.errors import UserError
from vision.models import DAT, Restormer, RNNDecoder, RNNEncoder, Swin, SwinRestorer, ViT
from vision.tasks import Classification

SMALL = {"dim": 32, "depth": 8, "heads": 2, "hidden": 128}
SEQUENCES = (torch.ones(8, 40, dtype=torch.long), torch.ones(8, 40, dtype=torch.long))
FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "ViT": (lambda: ViT(64, 8, dim=64, depth=8, heads=2), (torch.rand(4, 3, 64, 64),)),
    "Swin": (lambda: Swin(64, dim=32, depths=(6, 6), heads=(1, 2), window_size=4), (torch.rand(4, 3, 64, 64),)),
    "DAT": (lambda: DAT(64, dim=24, depths=(2, 2, 6, 2), heads=(1, 2, 3, 6), window_size=4), (torch.rand(4, 3, 64, 64),)),
    "Restormer": (lambda: Restormer(dim=16, depths=(4, 4, 4, 4), refinement=4), (torch.rand(2, 3, 32, 32),)),
    "SwinRestorer": (lambda: SwinRestorer(dim=32, depths=(2,) * 6, heads=2), (torch.rand(2, 3, 32, 32),)),
    "EncoderDecoder": (
        lambda: core.EncoderDecoder(core.Encoder(50, **SMALL), core.Decoder(50, memory_dim=32, **SMALL)),
        SEQUENCES,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_take_at_most_half(family: str) -> None:
    """The peak of what a training step holds above weights and gradients, counted tensor by tensor. Same gradients."""
    make, inputs = FAMILIES[family]
    torch.manual_seed(0)
    model = make()
    kept, kept_gradients = activations(model, inputs)
    model.set_grad_checkpointing()
    recomputed, gradients = activations(model, inputs)
    assert recomputed <= kept / 2
    for gradient, kept_gradient in zip(gradients, kept_gradients, strict=True):
        torch.testing.assert_close(gradient, kept_gradient, atol=1e-5, rtol=1e-4)
    model.set_grad_checkpointing(False)
    assert activations(model, inputs)[0] == kept


class Counter(TorchDispatchMode):
    """The most bytes that tensors made within took at once; `known` are those that there were before."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage()) not in self.seen:
                self.seen.add(storage)
                weakref.finalize(storage, self.free, storage.nbytes())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
        return result

    def free(self, size: int) -> None:
        self.now -= size


def activations(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[int, list[torch.Tensor]]:
    """The most bytes that a step takes at once beside weights and gradients, and the gradients."""
    model.train()
    for _ in range(2):  # the second time, there are gradients to add to, and tables to look up
        model.zero_grad(set_to_none=False)
        torch.manual_seed(1)  # of dropout
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        with Counter([*model.parameters(), *model.buffers(), *gradients, *inputs]) as counter:
            model(*inputs).square().mean().backward()
    return counter.most, [gradient.clone() for gradient in gradients]


def test_a_callback_turns_it_on_in_training() -> None:
    model = ViT(28, 14, 1, 10, dim=16, depth=2, heads=2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", max_steps=1, limit_val_batches=0, callbacks=[GradientCheckpointing()], **quiet)
    trainer.fit(Classification(model), datamodule=EmbeddedFashionMNIST(batch_size=4))
    assert model.checkpointing


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), core.EncoderDecoder(RNNEncoder(9, 8), RNNDecoder(9, 8, memory_dim=8))],
    ids=["Linear", "EncoderDecoder"],
)
def test_models_without_blocks_are_refused(model: nn.Module) -> None:
    task = Classification(ViT(28, 14, 1, 10, dim=16, depth=1, heads=2))
    task.model = model
    with pytest.raises(UserError, match=f"{type(model).__name__} has no blocks to recompute; leave GradientCheckpointing out"):
        GradientCheckpointing().setup(Trainer(accelerator="cpu", logger=False), task, "fit")
