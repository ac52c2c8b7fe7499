"""LightningCLI with run folders, checkpoints that survive, errors in one line, and a resume that believes the flags."""

from __future__ import annotations

import datetime
import inspect
import re
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from jsonargparse import Namespace
from lightning import Callback, Trainer
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.callbacks import OnExceptionCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from vision.callbacks import Pictures, Preemption, Progress, Summary, TrainingHealth
from vision.commands.checkpoints import AtomicCheckpointIO, BestCheckpoint, LastCheckpoint, newest_loadable, verify
from vision.commands.parser import Parser, refuse_dangerous_names
from vision.commands.predictions import WritePredictions
from vision.commands.resume import KeepChangedOptions, RunRecord
from vision.errors import UserError
from vision.hub import by_timm, check_timm, refusal, timm_models
from vision.runs import CHECKPOINTS, ROOT, checkpoints_in, claim_run, config_name, create_run, release_run, run_of

DEFAULT_CALLBACKS = (Progress, TrainingHealth, Preemption, Pictures, Summary)
# Options of the trainer's methods that are no matter of a config: loaders come from the data, checkpoints are never
# unpickled, and a config of one command serves the others.
NOT_OPTIONS = {"model", "datamodule", "train_dataloaders", "val_dataloaders", "dataloaders"}
NOT_OPTIONS |= {"weights_only", "verbose", "return_predictions"}


class MetricsLog(CSVLogger):
    """`metrics.csv` directly in the run folder. Options of the model are in `config.yaml`, not in a second file as well."""

    def log_hyperparams(self, params: Any = None) -> None:
        pass


class TrainerCLI(LightningCLI):
    """One of `fit`, `validate`, `test`, `predict`, from options and configs to the end of the run.

    Args:
        command: which of them; only its parser is built.
        args: options as on the command line, or a config as a dict.
        configs: the config files among the options; the last one names the run.
        run: False builds the model, the data and the trainer, and stops there.
        test: with `fit`, whether the best checkpoint is tested afterwards (where the data have a test set).
    """

    def __init__(
        self,
        command: str,
        args: Sequence[str] | dict[str, Any],
        *,
        configs: Sequence[Path] = (),
        run: bool = True,
        test: bool = True,
    ) -> None:
        self.command, self.configs, self.runs_now, self.tests_after = command, list(configs), run, test
        self.folder: Path | None = None
        self.claimed: Path | None = None  # the same, in the process that created it
        self.scratch: tempfile.TemporaryDirectory[str] | None = None
        self.resumed_from: Path | None = None
        self.resume = KeepChangedOptions()
        refuse_dangerous_names()
        super().__init__(
            args={"subcommand": command, command: args} if isinstance(args, dict) else [command, *args],
            parser_class=Parser,
            parser_kwargs={"allow_abbrev": False, "prog": "vision"},
            save_config_callback=None,  # RunRecord
            seed_everything_default=0,
            auto_configure_optimizers=False,  # the tasks bring their own
            trainer_defaults={"log_every_n_steps": 10, "enable_model_summary": False},
        )

    # The parser

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        return {self.command: NOT_OPTIONS}

    def parse_arguments(self, parser: Parser, args: list[str] | dict[str, Any]) -> None:  # type: ignore[override]
        self.config = parser.parse_object(args) if isinstance(args, dict) else parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Finds the checkpoint. Lightning would lay its hyper-parameters over the config here, flags included (PL #21455)."""
        options = self.config[self.command]
        given = options.get("ckpt_path")
        if given is None:
            if self.command != "fit" and self.runs_now:
                hint = f"--ckpt_path last takes the newest run of {self.run_name()}"
                say(f"no --ckpt_path: the model is used as its config builds it ({hint})")
            return
        self.resumed_from = find_checkpoint(str(given), self.runs_folder(), training=self.command == "fit")
        options["ckpt_path"] = self.resumed_from and str(self.resumed_from)

    def run_name(self) -> str:
        """What the runs of this config are called."""
        if self.configs:
            return config_name(self.configs[-1])
        return self.config[self.command].model.class_path.rpartition(".")[2].lower()

    def runs_folder(self) -> Path:
        """Where the runs of this config lie."""
        chosen = self.config[self.command].trainer.default_root_dir
        return Path(chosen) if chosen else ROOT / self.run_name()

    # Model, data, trainer

    def instantiate_classes(self) -> None:
        from_timm = list(timm_models(self.config[self.command].as_dict()))
        for options in from_timm:
            check_timm(options)
        try:
            super().instantiate_classes()
        except Exception as error:
            self.release()
            cause = constructor_error(error)
            if from_timm and by_timm(cause):
                raise UserError(refusal(from_timm[0], cause)) from cause
            if isinstance(cause, (MisconfigurationException, ValueError, RuntimeError)) and not isinstance(cause, UserError):
                hint = "; use --trainer.accelerator auto or cpu" if "backend found" in str(cause) else ""
                raise UserError(f"{str(cause).rstrip('!')}{hint}") from cause
            raise cause from cause.__cause__
        if self.folder:
            say(f"run folder: {self.folder}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer of the config, with the run folder, the log, the checkpoints and the default callbacks."""
        chosen = self._get(self.config_init, "trainer")
        own = as_list(chosen.get("callbacks"))
        refuse_silent_resume(own)
        if chosen.get("barebones"):  # measures bare speed: takes no callbacks, no log, no folder
            return super().instantiate_trainer(**kwargs)
        if chosen.get("fast_dev_run"):
            self.scratch = tempfile.TemporaryDirectory()  # what callbacks write goes with it
            kwargs["default_root_dir"] = self.scratch.name
            return super().instantiate_trainer(callbacks=[*own, *default_callbacks(chosen)], **kwargs)
        self.folder = folder = self.make_folder(chosen.get("default_root_dir"))
        kwargs["default_root_dir"] = str(folder)
        if chosen.get("logger") in (None, True):
            kwargs["logger"] = MetricsLog(folder, name="", version="")
        kwargs["plugins"] = [*as_list(chosen.get("plugins")), AtomicCheckpointIO()]
        callbacks = [*own, *default_callbacks(chosen), self.resume, RunRecord(self.config_text())]
        if self.command == "predict":
            callbacks.append(WritePredictions())
        if self.command != "fit":
            kwargs["enable_checkpointing"] = False
        elif chosen.get("enable_checkpointing") is not False:
            callbacks += self.checkpoints(folder / CHECKPOINTS)
        return super().instantiate_trainer(callbacks=callbacks, **kwargs)

    def make_folder(self, chosen: str | None) -> Path:
        """The folder of this run. Only the first process creates it; the others learn of it when they meet (RunRecord)."""
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            return self.runs_folder()
        self.claimed = claim_run(Path(chosen)) if chosen else create_run(self.runs_folder())
        return self.claimed

    def checkpoints(self, folder: Path) -> list[Callback]:
        """`best.ckpt` by the task's `monitor = (metric, mode)`, and `last.ckpt`."""
        monitor, mode = getattr(self.model, "monitor", ("val/accuracy", "max"))
        return [BestCheckpoint(folder, monitor, mode), LastCheckpoint(folder)]

    def config_text(self) -> str:
        """The config of this run as YAML. The checkpoint it went on from is told in a comment: to run the config again,
        or to test with it, is not to go on from there."""
        parser = self._parser(self.command)
        config = self.config[self.command].clone()
        config["ckpt_path"] = None
        everything = "skip_unset" if "skip_unset" in inspect.signature(parser.dump).parameters else "skip_none"
        parser.dump_header = None
        versions = f"torch {torch.__version__}, lightning {lightning.__version__}"
        head = f"# vision {self.command}, {datetime.datetime.now():%Y-%m-%d %H:%M}, {versions}\n"
        if self.resumed_from:
            head += f"# with the checkpoint {self.resumed_from}\n"
        return head + parser.dump(config, **{everything: False})

    # The run

    def _run_subcommand(self, subcommand: str) -> None:
        if not self.runs_now:
            return
        self.refuse_nothing()
        failed = True
        try:
            super()._run_subcommand(subcommand)
            failed = False
        except SystemExit as stop:
            if isinstance(stop.__context__, KeyboardInterrupt):  # Lightning has saved, and made an exit of it
                self.listen_again()
                raise KeyboardInterrupt(self.where_it_stands()) from None
            raise
        except MisconfigurationException as error:
            raise UserError(str(error)) from error
        except RuntimeError as error:
            if str(error).startswith("Error(s) in loading state_dict"):
                raise UserError(self.explain_mismatch(error)) from error
            raise
        finally:
            self.release(failed=failed)

    def refuse_nothing(self) -> None:
        """A training of no steps would test the model as it was built, and look like a result."""
        trainer = self.trainer
        if self.command == "fit" and 0 in (trainer.max_epochs, trainer.max_steps):
            self.release()
            name = "max_epochs" if trainer.max_epochs == 0 else "max_steps"
            raise UserError(f"trainer.{name}=0 trains nothing; use 1 or more, or `vision test` to measure a model")

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        own = {"test": {"verbose": False}, "predict": {"return_predictions": False}}  # Summary and WritePredictions tell them
        return super()._prepare_subcommand_kwargs(subcommand) | own.get(subcommand, {})

    def after_fit(self) -> None:
        """Tests the best checkpoint, where there is something to test with."""
        if self.trainer.global_step == self.resume.step:
            say(f"nothing was left to train: the checkpoint is at step {self.resume.step}; give more --trainer.max_epochs")
        has_test = self.datamodule is not None and is_overridden("test_dataloader", self.datamodule)
        if not (self.tests_after and has_test and is_overridden("test_step", self.model)) or self.trainer.interrupted:
            return
        best = next((c.best_model_path for c in self.trainer.checkpoint_callbacks if isinstance(c, BestCheckpoint)), "")
        self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=best or None, verbose=False)

    def where_it_stands(self) -> str:
        """One line for a run that was stopped by Ctrl-C."""
        kept = checkpoints_in(self.folder) if self.folder else []
        if not kept or self.command != "fit":
            return "stopped; nothing was saved"
        return f"stopped; the state is in {kept[0]}; go on with: vision fit --ckpt_path {kept[0]}"

    def explain_mismatch(self, error: RuntimeError) -> str:
        """One line for a checkpoint of another model than the config builds."""
        first = " ".join(str(error).splitlines()[1].split()) if "\n" in str(error) else str(error)
        shapes = re.match(r"size mismatch for (\S+): .*?Size\((\[.*?\])\).*?Size\((\[.*?\])\)", first)
        first = f"{shapes[1]} is {shapes[2]} there and {shapes[3]} here" if shapes else first
        path = self.resumed_from
        run = run_of(path) if path else None
        advice = f"use its own config: --config {run}/config.yaml" if run else "use the config it was trained with"
        return f"{path} does not fit the model of this config ({first[:160]}); {advice}"

    def release(self, *, failed: bool = False) -> None:
        """Leaves no empty folder behind."""
        if self.scratch:
            self.scratch.cleanup()
        if self.claimed:
            release_run(self.claimed, failed=failed)

    def listen_again(self) -> None:
        """Lightning turns Ctrl-C off for its shutdown, and leaves it off."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)


def find_checkpoint(given: str, runs: Path, *, training: bool) -> Path | None:
    """The file that `--ckpt_path` means.

    Args:
        given: a file; a run folder (its newest checkpoint); "last" or "best" (of the newest run that has one).
        runs: the folder with the runs of this config.
        training: whether training is to go on from it.

    Returns:
        None if "last" is asked for and there is none: training starts from the beginning, and says so.

    Raises:
        UserError: no such checkpoint, or it is broken.
    """
    if "://" in given:
        raise UserError(f"{given}: checkpoints are not read from the network; download it and give the file")
    if given not in {"last", "best"} and not Path(given).is_dir():
        verify(Path(given), training=training)
        return Path(given)
    name, folder = (given, runs) if given in {"last", "best"} else ("last", Path(given))
    found = newest_loadable(folder, name, say)
    if found:
        say(f"checkpoint: {found}")
    elif given == "last" and training:
        say(f"--ckpt_path last: no checkpoint in {folder} yet; training starts from the beginning")
    else:
        raise UserError(f"no checkpoint in {folder}; train first (vision fit), or give a file: --ckpt_path FILE.ckpt")
    return found


def constructor_error(error: Exception) -> Exception:
    """What a constructor raised: the parser, which tries the alternatives of a type in turn, wraps it in a text of its own."""
    wrappers = ("Does not validate against any of the Union", "Problem with given class_path")
    while str(error).startswith(wrappers) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error


def default_callbacks(trainer: Namespace) -> list[Callback]:
    """The callbacks every run has, but those that the config brings itself, and the progress bar if it is switched off."""
    own = as_list(trainer.get("callbacks"))
    has_bar = trainer.get("enable_progress_bar") is False or any(isinstance(callback, ProgressBar) for callback in own)
    wanted = [kind for kind in DEFAULT_CALLBACKS if not (kind is Progress and has_bar)]
    return [kind() for kind in wanted if not any(isinstance(callback, kind) for callback in own)]


def refuse_silent_resume(callbacks: list[Callback]) -> None:
    """Lightning goes on from this callback's file whenever it is there, without being asked (PL #19827)."""
    if any(isinstance(callback, OnExceptionCheckpoint) for callback in callbacks):
        raise UserError(
            "trainer.callbacks: OnExceptionCheckpoint would resume its file unasked; leave it out, "
            "last.ckpt is saved at an exception as well"
        )


def as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


@rank_zero_only
def say(text: str) -> None:
    """One line beside the results, which go to standard output."""
    print(text, file=sys.stderr, flush=True)
