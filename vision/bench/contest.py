"""What a comparison is: a setting, and the sides that do the same work in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

Step = Literal["inference", "training"]
Precision = Literal["fp32", "bf16"]
STEPS: tuple[Step, ...] = ("inference", "training")
VARIANTS: tuple[tuple[Precision, bool], ...] = (("fp32", False), ("bf16", False), ("fp32", True), ("bf16", True))


@dataclass(frozen=True)
class Setting:
    """One line of the table. Plain values: a child process makes the same contest from them.

    Attributes:
        case: module of `vision.bench.cases`.
        name: what is compared, such as the model's name.
        step: "inference", or "training" (forward, backward and AdamW).
        precision: "fp32" or "bf16": of weights and activations in inference, by autocast in training.
        compiled: whether torch.compile takes all sides.
        batch: pictures or rows.
        size: side of the pictures in pixels, or tokens of a row.
        device: where all of it is.
    """

    case: str
    name: str
    step: Step = "inference"
    precision: Precision = "fp32"
    compiled: bool = False
    batch: int = 1
    size: int = 224
    device: str = "cpu"

    @property
    def how(self) -> str:
        return f"{self.step}, {self.precision}{', compiled' if self.compiled else ''}"

    def picture(self, channels: int = 3) -> Tensor:
        return torch.rand(self.batch, channels, self.size, self.size, generator=seeded()).to(self.device)


@dataclass(frozen=True)
class Plan:
    """Which settings are measured, and how long.

    Attributes:
        full: all settings, not only the quick ones.
        tiny: the smallest models and sizes, to see that a case runs.
        repeats: most rounds; fewer once `seconds` have passed, but at least 5.
        seconds: of measuring for a setting.
        threads: of the processor.
        device: "cpu" or "cuda".
        memory: whether peak memory is measured, by a process a side.
        only: names and values, as text, that a setting must have, such as ("batch", "8").
    """

    full: bool = False
    tiny: bool = False
    repeats: int = 15
    seconds: float = 5.0
    threads: int = 1
    device: str = "cpu"
    memory: bool = True
    only: tuple[tuple[str, str], ...] = ()

    def wants(self, setting: Setting) -> bool:
        values = asdict(setting)
        allowed: dict[str, set[str]] = {}
        for name, value in self.only:
            allowed.setdefault(name, set()).add(value)
        return all(str(values[name]) in texts for name, texts in allowed.items())


@dataclass
class Side:
    """One implementation.

    Attributes:
        build: the module, its weights at random.
        output: what it gives, to be compared and timed.
        loss: what it is trained by; None is the mean square of the output.
        lend: copies this side's weights into ours (first argument); None: they cannot be copied, or are equal by the seed.
    """

    build: Callable[[], Any]
    output: Callable[[Any], Tensor]
    loss: Callable[[Any], Tensor] | None = None
    lend: Callable[[Any, Any], object] | None = None

    def loss_of(self, module: nn.Module) -> Tensor:
        return self.output(module).float().square().mean() if self.loss is None else self.loss(module)


@dataclass
class Contest:
    """Sides that do the same work.

    Attributes:
        sides: by name; the first one is ours.
        tolerance: how far the outputs of two sides may lie apart in fp32, over their deviation.
        compared: the peers whose outputs are compared; None is all.
        rated: whether there are ratios.
        differ: how far apart two outputs are; None is the largest difference over the deviation.
        units, unit: work of a step, such as 8 pictures.
        targets: how many times as fast as a peer ours should be.
        memory_targets: the most that a step of ours should take, over the peer's.
        notes: what the reader should know.
        counted: whether the work in FLOP is counted.
    """

    setting: Setting
    sides: dict[str, Side]
    tolerance: float = 1e-5
    compared: frozenset[str] | None = None
    rated: bool = True
    differ: Callable[[Tensor, Tensor], float] | None = None
    units: int = 1
    unit: str = "pictures"
    targets: dict[str, float] = field(default_factory=dict)
    memory_targets: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    counted: bool = True


@dataclass
class Row:
    """What was found: plain values, written to JSON as they stand.

    Attributes:
        sides: name -> seconds of each round, median, min, max, units a second, share of the product's rate, peak bytes, and
            in eager mode the parts of the time that products, convolutions, attention, norms and the rest take.
        ratios: peer -> its time over ours in each round: median, min, max.
        errors: peer -> how far its output lies from ours.
        failed: why there is no time.
    """

    setting: dict[str, Any]
    sides: dict[str, dict[str, Any]] = field(default_factory=dict)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)
    memory_targets: dict[str, float] = field(default_factory=dict)
    unit: str = "pictures"
    flops: int = 0
    rate: float = 0.0
    notes: list[str] = field(default_factory=list)
    failed: str | None = None

    @classmethod
    def of(cls, contest: Contest) -> Row:
        same = {name: getattr(contest, name) for name in ("targets", "memory_targets", "unit")}
        return cls(asdict(contest.setting), notes=list(contest.notes), **same)


def grow(case: str, name: str, plan: Plan, *, sizes: Sequence[int], batches: Sequence[int] = (1, 8)) -> Iterator[Setting]:
    """The settings of a model: one picture of the first size; in full also bf16, compiled, larger batches and sizes."""
    base = Setting(case, name, size=sizes[0], device=plan.device)
    for step in STEPS:
        if not plan.full:
            yield replace(base, step=step)
            continue
        for batch in batches:
            for precision, compiled in VARIANTS:
                yield replace(base, step=step, precision=precision, compiled=compiled, batch=batch)
        for size in sizes[1:]:
            yield replace(base, step=step, size=size)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def like(x: Tensor, module: nn.Module) -> Tensor:
    """Pictures in the precision of the module's weights."""
    return x.to(next(module.parameters()).dtype)
