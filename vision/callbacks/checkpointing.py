"""Less memory for more time: activations computed again in the backward pass."""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer

from vision.errors import UserError


class GradientCheckpointing(Callback):
    """Trains with `model.set_grad_checkpointing()` (timm's convention): only the inputs of blocks are kept for the gradient, and
    each block runs once more in the backward pass (Chen et al. 2016). The gradients are the same.

    For models of this package but recurrent networks, and most of timm's.

    Raises:
        UserError: the model has no blocks to recompute.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        model: Any = pl_module.model
        try:
            model.set_grad_checkpointing()
        except (AttributeError, AssertionError) as error:  # timm's models that cannot assert it
            name = type(model).__name__
            raise UserError(f"{name} has no blocks to recompute; leave GradientCheckpointing out") from error
