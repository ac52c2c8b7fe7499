"""Two processes share the pictures of a test: writes the tables that the first one tells."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning import Callback

sys.path.insert(0, str(Path(__file__).parent))
from test_restoration import THREE, Enlarger, Waves, trainer_in

from vision.tasks import Restoration


class Saved(Callback):
    def on_test_end(self, trainer, task):
        if trainer.is_global_zero:
            torch.save(task.tables(), sys.argv[1])


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = trainer_in(Path(sys.argv[1]).parent, devices=2, strategy="ddp_spawn", callbacks=[Saved()])
    trainer.test(Restoration(Enlarger()), Waves(sizes=THREE), verbose=False)
