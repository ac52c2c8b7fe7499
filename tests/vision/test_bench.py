"""`vision bench`: fair times, wrong answers refused, what it writes; and every case in its smallest size."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

import vision.bench.run
from vision.bench.alone import contend_alone
from vision.bench.cases import CASES, load
from vision.bench.cases.translate import lay_out, made_up, pack, padding
from vision.bench.clock import interleave, product_rate, ratios, spread
from vision.bench.contest import Contest, Plan, Setting, Side
from vision.bench.memory import measure
from vision.bench.run import NO_BF16, contend, run_case
from vision.bench.work import apart, count_flops, kind_of, parts_of_time
from vision.cli import main
from vision.errors import UserError

PLAN = Plan(tiny=True, repeats=1, seconds=0.0, memory=False)
SETTING = Setting("made up", "linear", batch=4, size=8)


class Clock:
    """Advances only where it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def task(self, *seconds: float):
        """A run that takes so long, the last time for ever."""
        left = list(seconds)

        def run() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_rounds_go_in_turn_after_one_that_does_not_count():
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "ABC"}
    found = interleave(runs, repeats=2, seconds=60.0)
    assert order == list("ABC" + "ABC" + "BCA")
    assert {name: len(times) for name, times in found.items()} == {"A": 2, "B": 2, "C": 2}


@pytest.mark.parametrize(("seconds", "rounds"), [(0.0, 5), (11.0, 6), (100.0, 8)])
def test_slow_rounds_are_fewer_but_at_least_five(seconds, rounds):
    clock = Clock()
    found = interleave({"A": clock.task(9, 1), "B": clock.task(9, 1)}, repeats=8, seconds=seconds, clock=clock)
    assert found == {"A": [1] * rounds, "B": [1] * rounds}  # the first round, which took 9, is not among them


def test_ratios_are_of_the_same_round():
    """A machine that is twice as slow in the second round changes the times, not the ratios."""
    clock = Clock()
    found = interleave({"ours": clock.task(1, 1, 2, 1), "peer": clock.task(3, 3, 6, 3)}, 3, 60.0, clock=clock)
    assert spread(found["peer"]) == {"median": 3, "min": 3, "max": 6}
    assert ratios(found) == {"peer": {"median": 3, "min": 3, "max": 3}}


def contest(spoil: float = 0.0, **options) -> Contest:
    x = torch.randn(4, 8)

    def lend(ours: nn.Module, theirs: nn.Module) -> None:
        ours.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            ours.bias.add_(spoil)

    sides = {
        "ours": Side(lambda: nn.Linear(8, 8), lambda m: m(x)),
        "peer": Side(lambda: nn.Linear(8, 8), lambda m: m(x), lend=lend),
    }
    return Contest(SETTING, sides, units=4, targets={"peer": 0.001}, **options)


def test_a_row_holds_what_was_measured():
    row = contend(contest(), PLAN)
    assert row.failed is None
    assert row.errors == {"peer": 0.0}
    assert row.flops == 2 * 4 * 8 * 8
    assert set(row.sides["ours"]) == {"seconds", "median", "min", "max", "per_second", "share"}
    assert 0 < row.sides["ours"]["share"] < 1
    assert row.ratios["peer"]["min"] <= row.ratios["peer"]["median"] <= row.ratios["peer"]["max"]


@pytest.mark.parametrize("spoil", [0.01, float("nan")])
def test_a_wrong_answer_is_not_timed(spoil, monkeypatch, capsys):
    row = contend(contest(spoil), PLAN)
    assert row.failed is not None
    assert row.failed.startswith("wrong: ours lies ")
    assert (row.sides, row.ratios) == ({}, {})
    monkeypatch.setattr(vision.bench.run, "run_case", lambda name, plan: iter([row]))
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--cases", "vit", "--tiny", "--no-memory"])
    assert stop.value.code == 1
    assert "wrong: ours lies" in capsys.readouterr().out


def test_a_wrong_gradient_is_a_wrong_answer():
    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(x) if not torch.is_grad_enabled() else 2 * super().forward(x) - super().forward(x).detach()

    made = contest()
    made.setting = Setting("made up", "linear", "training", batch=4, size=8)
    made.sides["ours"].build = lambda: Twice(8, 8)
    assert (contend(made, PLAN).failed or "").startswith("wrong: the gradient of ours has length ")


def test_low_precision_is_compared_with_ones_own_output():
    class Rough(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(self.weight.dtype)) * (9 if self.weight.dtype == torch.bfloat16 else 1)

    made = contest()
    made.setting = Setting("made up", "linear", precision="bf16", batch=4, size=8)
    for side in made.sides.values():
        side.build = lambda: Rough(8, 8)
    assert "from its own eager fp32 output" in (contend(made, PLAN).failed or "")


def test_the_loss_of_a_compiled_step_is_compared_too():
    class Spoiled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * (2 if self.training else 1)

    made = contest()
    made.setting = Setting("made up", "linear", "training", "bf16", batch=4, size=8)
    for side in made.sides.values():
        side.build = lambda: Spoiled(8, 8)
    assert "from its own eager fp32 loss" in (contend(made, PLAN).failed or "")


def test_bf16_is_left_out_where_the_processor_has_none(monkeypatch):
    from vision.bench.report import lines, notes

    monkeypatch.setattr("vision.bench.run.knows_bf16", lambda: False)
    rows = list(run_case("vit", replace(PLAN, tiny=False, full=True, only=(("precision", "bf16"), ("batch", "1")))))
    assert len(rows) > 1
    assert list(lines(rows)) == []
    assert notes(rows) == [f"vit: {NO_BF16}"]


def test_outputs_of_another_shape_or_without_a_number_are_infinitely_far():
    x = torch.randn(3)
    assert apart(x, x) == 0
    assert apart(x[:2], x) == apart(x * float("nan"), x) == float("inf")


def test_the_product_and_attention_are_counted():
    from core import Attention

    side = Side(lambda: None, lambda m: m(torch.randn(1, 10, 16)))
    expected = 2 * 10 * 16 * (48 + 16) + 2 * 2 * 10 * 10 * 16
    assert count_flops(side, Attention(16, 2), Setting("a", "b")) == expected
    assert 2 * expected < count_flops(side, Attention(16, 2), Setting("a", "b", "training")) < 4 * expected
    assert product_rate("fp32", "cpu", size=64, repeats=2) > 1e6


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_the_gradient_of_a_grouped_convolution_is_twice_its_work(groups):
    """torch counts it as if there were no groups: 9 times too much for these 8."""
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=groups, bias=False)
    side = Side(lambda: None, lambda m: m(torch.randn(2, 8, 6, 5, requires_grad=True)))
    assert count_flops(side, conv, Setting("a", "b")) == (work := 2 * 2 * 8 * 6 * 5 * 9 * 8 // groups)
    assert count_flops(side, conv, Setting("a", "b", "training")) == 3 * work


# The cases


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", [name for name in CASES if name != "loader"])
def test_a_case_runs_and_its_outputs_are_the_peers(case):
    rows = list(run_case(case, PLAN))
    assert rows
    for row in rows:
        assert row.failed is None
        assert json.loads(json.dumps(asdict(row))) == asdict(row)
        assert len(row.sides) > 1
        assert bool(row.ratios) == (case != "growth")


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_the_loader_runs_and_so_does_the_first_batch():
    step, restorer, first = run_case("loader", PLAN)
    assert set(step.sides) == set(restorer.sides) == {"loader", "training step"}
    assert (first.failed, list(first.ratios)) == (None, ["10 s"])


def test_every_setting_can_be_made_anew_from_plain_values():
    """A child process does so, to measure memory."""
    for name in CASES:
        if name != "loader":
            for plan in (Plan(), Plan(full=True), PLAN):
                settings = list(load(name).settings(plan))
                assert len(settings) == len(set(settings)) > 0
                assert all(Setting(**json.loads(json.dumps(asdict(setting)))) == setting for setting in settings)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_a_contest_in_a_process_of_its_own():
    """What breaks there is told in its row, and no other is touched."""
    row = contend_alone(Setting("growth", "attention", size=8), replace(PLAN, memory=True))
    assert (row.failed, list(row.sides)) == (None, ["global", "windowed", "transposed", "deformable"])
    assert row.sides["global"]["peak_bytes"] > 0
    assert (contend_alone(Setting("vit", "none"), PLAN).failed or "").startswith("the process ended with 1: KeyError")


def test_memory_that_could_not_be_measured_is_a_note(monkeypatch):
    def fail(*_: object) -> dict[str, int]:
        raise UserError("no memory")

    monkeypatch.setattr("vision.bench.run.peak", fail)
    row = contend(contest(), replace(PLAN, memory=True))
    assert (row.failed, row.notes) == (None, ["no memory", "no memory"])


def test_where_the_time_goes():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LayerNorm(288), nn.Linear(288, 288), nn.ReLU())
    found = parts_of_time(lambda: model(torch.randn(64, 3, 8, 8)), "cpu")
    assert sum(found.values()) == pytest.approx(1)
    assert found["attention"] == 0
    assert all(found[kind] > 0 for kind in ("products", "convolutions", "norms", "rest"))
    assert kind_of("aten::_scaled_dot_product_flash_attention_for_cpu_backward") == "attention"


@pytest.mark.usefixtures("unchecked")
def test_memory_of_a_step():
    found = measure(next(load("growth").settings(PLAN)), "global")
    assert found["peak_bytes"] > found["step_bytes"] >= 0


def test_sentences_are_packed_once_each_with_less_padding():
    sentences = made_up(20, 16)
    order = pack(sentences)
    assert sorted(i for row in order for i in row) == list(range(20))
    packed, apart_each = lay_out(order, sentences), lay_out([[i] for i in range(20)], sentences)
    assert len(packed.source) < 20
    assert padding([packed]) < padding([apart_each])


def test_only_what_is_asked_for():
    plan = Plan(full=True, only=(("batch", "8"), ("step", "training"), ("precision", "fp32"), ("precision", "bf16")))
    chosen = [setting for setting in load("swin").settings(plan) if plan.wants(setting)]
    assert {setting.batch for setting in chosen} == {8}
    assert [(setting.precision, setting.compiled) for setting in chosen] == [
        ("fp32", False),
        ("bf16", False),
        ("fp32", True),
        ("bf16", True),
    ]
    assert {setting.step for setting in chosen} == {"training"}
