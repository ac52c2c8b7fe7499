"""Keeps Lightning from saying things that are as they should be here; all else it says is heard."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

WARNINGS = (
    r"The '\w+' does not have many workers",  # small pictures in memory need none
    r"The dirpath has changed from",  # a resumed run has a folder of its own
    r"Checkpoint directory .* exists and is not empty",  # BestCheckpoint brings the best one so far along
    r"Experiment logs directory .* exists and is not empty",
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning's own use of torch
    r"Starting from v1\.9\.0, `tensorboardX` has been removed",
)
NO_TRAINING = (r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",)  # those of training, not needed
MESSAGES = (
    "💡 Tip",
    "GPU available: False",
    "Detected KeyboardInterrupt",  # the command line says it in its own line
    "An KeyboardInterrupt was raised",
    "TPU available",
    "HPU available",
    "Restored all states",
    "Restoring states",
    "Loaded model weights",
    "Seed set to",
    "`Trainer.fit` stopped: `max_",
    "=1)` was configured so",  # fast_dev_run, which says so itself
)
LOGGERS = ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed", "lightning.fabric.utilities.rank_zero")


@contextlib.contextmanager
def quiet(*, training: bool) -> Iterator[None]:
    """Drops these warnings and messages while it lasts.

    Args:
        training: whether the command trains.
    """

    def wanted(record: logging.LogRecord) -> bool:
        return not any(message in record.getMessage() for message in MESSAGES)

    switch = "JSONARGPARSE_DEPRECATION_WARNINGS"  # about calls that Lightning makes
    before = os.environ.get(switch)
    os.environ.setdefault(switch, "off")
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(wanted)
    try:
        with warnings.catch_warnings():
            for message in WARNINGS if training else WARNINGS + NO_TRAINING:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        if before is None:
            del os.environ[switch]
        for logger in loggers:
            logger.removeFilter(wanted)
