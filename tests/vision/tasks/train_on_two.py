"""Two processes train on batches of unequal lengths: writes the gradients of their steps, and what they should be."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from lightning import Trainer

sys.path.insert(0, str(Path(__file__).parent))
from test_sequence import Batches, Gradients, batch, model, whole_gradient

from vision.tasks import Sequence


class Dealt(Batches):
    """Batch i goes to process i % 2."""

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.batches[self.trainer.global_rank :: 2], batch_size=None)


class Saved(Gradients):
    def on_train_end(self, trainer, task):
        if trainer.is_global_zero:
            step = len(self.batches) // len(self.seen)
            groups = [self.batches[i : i + step] for i in range(0, len(self.batches), step)]
            torch.save((self.seen, [whole_gradient(self.start, group) for group in groups]), sys.argv[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batches = [batch([1 + (3 * i) % 11] * (1 + i % 4), i) for i in range(8)]
    task, saved = Sequence(model(), lr=1e-12, weight_decay=0, clip=0), Saved()
    saved.start, saved.batches = copy.deepcopy(task), batches
    Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_spawn",
        max_epochs=1,
        accumulate_grad_batches=2,
        use_distributed_sampler=False,
        callbacks=[saved],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(task, Dealt(batches))
