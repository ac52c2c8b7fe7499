"""One contest from beginning to end: weights copied, outputs compared, then time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from vision.bench.cases import load
from vision.bench.clock import finisher, interleave, product_rate, ratios, spread
from vision.bench.contest import Contest, Plan, Row, Setting, Side
from vision.bench.memory import peak
from vision.bench.work import apart, count_flops, gradient_size, loss, output, parts_of_time, prepare, stepper
from vision.errors import UserError
from vision.packing import knows_bf16

GRADIENTS = 1e-3  # how far the lengths of two gradients may lie apart, over their size
ROUGH = {"bf16": 0.5, "compiled": 1e-3}  # how far a side may lie from its own eager fp32 output, over its deviation
NO_BF16 = "bf16 is not measured: this processor multiplies no bfloat16, and a step would take minutes"


def run_case(name: str, plan: Plan) -> Iterator[Row]:
    """The rows of a case, as they are found: each in a process of its own, the tiny ones in this one."""
    from vision.bench.alone import contend_alone

    case = load(name)
    if hasattr(case, "rows"):
        yield from case.rows(plan)
        return
    for setting in filter(plan.wants, case.settings(plan)):
        if "bf16" in setting.how + setting.name and setting.device == "cpu" and not plan.tiny and not knows_bf16():
            yield Row(asdict(setting), notes=[NO_BF16])
        else:
            yield contend(case.contest(setting), plan) if plan.tiny else contend_alone(setting, plan)


def contend(contest: Contest, plan: Plan) -> Row:
    """Compares, then times. A wrong answer is not timed: the row says what is wrong."""
    row, setting = Row.of(contest), contest.setting
    peaks = measure_memory(contest, plan, row)  # while this process holds next to nothing
    modules = {name: build(side, setting) for name, side in contest.sides.items()}
    row.failed = compare(contest, modules, row)
    if row.failed:
        return row
    if contest.counted:
        # Of a peer, which does the work as the formula is written; of ours, where a fused kernel hides the peer's
        named = [*list(contest.sides)[1:2], *list(contest.sides)[:1]]
        counts = (count_flops(contest.sides[name], modules[name], setting) for name in named)
        row.flops = next((count for count in counts if count), 0)
    row.failed = make_fast(contest, modules)
    if row.failed:
        return row
    runs = {name: stepper(side, modules[name], setting) for name, side in contest.sides.items()}
    square = 256 if plan.tiny else 1024
    before = product_rate(setting.precision, setting.device, square)
    seconds = interleave(runs, plan.repeats, plan.seconds, finish=finisher(setting.device))
    row.rate = max(before, product_rate(setting.precision, setting.device, square))
    row.ratios = ratios(seconds) if contest.rated else {}
    for name, times in seconds.items():
        found: dict[str, Any] = {"seconds": times, **spread(times)}
        found |= {"per_second": contest.units / found["median"], "share": row.flops / found["median"] / row.rate or None}
        row.sides[name] = found | peaks.get(name, {})
        if not setting.compiled and not plan.tiny:
            row.sides[name]["parts"] = parts_of_time(runs[name], setting.device)
    return row


def measure_memory(contest: Contest, plan: Plan, row: Row) -> dict[str, dict[str, int]]:
    """Of each side; what could not be measured is a note."""
    found = {}
    for name in contest.sides if plan.memory else ():
        try:
            found[name] = peak(contest.setting, name, plan.threads)
        except UserError as error:
            row.notes.append(str(error))
    return found


def build(side: Side, setting: Setting) -> nn.Module:
    """A side's module in evaluation mode, every parameter moved off its start: zeros and ones would hide what they multiply.

    Sides that lend no weights have equal ones by the seed.
    """
    torch.manual_seed(0)
    module = side.build().to(setting.device).eval()
    if side.lend is not None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
    return module


def compare(contest: Contest, modules: dict[str, nn.Module], row: Row) -> str | None:
    """What is wrong with the outputs, in eager fp32, if anything is."""
    ours, *peers = contest.sides
    for peer in peers:
        side = contest.sides[peer]
        if contest.compared is not None and peer not in contest.compared:
            continue
        if side.lend is not None:
            side.lend(modules[ours], modules[peer])
        found = [output(contest.sides[name], modules[name]) for name in (ours, peer)]
        row.errors[peer] = (contest.differ or apart)(*found)
        if not row.errors[peer] <= contest.tolerance:
            return f"wrong: {ours} lies {row.errors[peer]:.1e} from {peer}, more than {contest.tolerance:.0e}"
        if contest.setting.step == "training":
            sizes = [gradient_size(contest.sides[name], modules[name]) for name in (ours, peer)]
            if not abs(sizes[0] - sizes[1]) <= GRADIENTS * sizes[1]:
                return f"wrong: the gradient of {ours} has length {sizes[0]:.6g}, that of {peer} {sizes[1]:.6g}"
    return None


def make_fast(contest: Contest, modules: dict[str, nn.Module]) -> str | None:
    """Every module in the setting's mode and precision; what is wrong with their outputs then, if anything is."""
    setting, training = contest.setting, contest.setting.step == "training"
    plain: dict[str, Tensor] = {}
    if setting.precision == "bf16" or setting.compiled:
        plain = {name: (loss if training else output)(side, modules[name]) for name, side in contest.sides.items()}
    for module in modules.values():
        prepare(module, setting)
    allowed = ROUGH[setting.precision if setting.precision == "bf16" else "compiled"]
    for name, reference in plain.items():
        if training:
            found = loss(contest.sides[name], modules[name], setting)
            error = float((found - reference).abs() / reference.abs())
        else:
            error = (contest.differ or apart)(output(contest.sides[name], modules[name]), reference)
        if not error <= allowed:
            what = "loss" if training else "output"
            return f"wrong: {name} ({setting.how}) lies {error:.1e} from its own eager fp32 {what}, more than {allowed:g}"
    return None
