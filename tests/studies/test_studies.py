"""Every study runs (a trial of a few steps) and leaves a table, a plot and a record of what was run, when and on what."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch

STUDIES = Path(__file__).parents[2] / "studies"
NAMES = sorted(path.stem for path in STUDIES.glob("*.py") if "def run(study: Study)" in path.read_text())


@pytest.fixture(autouse=True)
def _beside_their_runner(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(STUDIES)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_study_runs_and_tells_what_it_ran(name, unchecked):
    study, runner = importlib.import_module(name), importlib.import_module("runner")
    folder = runner.main(name, study.__doc__, study.run, ["--quick", "--threads", "1"])
    record = json.loads((folder / "result.json").read_text())
    assert {"command", "date", "seconds", "hardware", "versions", "quick", "tables"} == set(record)
    assert record["command"] == f"python studies/{name}.py --quick --threads 1"
    assert record["quick"]
    for table in record["tables"]:
        assert table["rows"]
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    assert (folder / "plot.png").stat().st_size > 5000
    assert "| --- |" in (folder / "result.md").read_text()


def test_every_study_is_in_the_docs():
    docs = (STUDIES.parent / "docs" / "studies.md").read_text()
    assert [name for name in NAMES if f"python studies/{name}.py" not in docs] == []
    assert len(NAMES) >= 7


def test_operations_of_a_layer_are_those_torch_counts():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from core import Attention

    study = importlib.import_module("why_transformer")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # others are not counted on a CPU
        Attention(study.DIM, 4)(torch.zeros(1, 64, study.DIM))
    (told,) = (row for row in study.counted(64) if row[0] == "self-attention")
    assert counter.get_total_flops() == pytest.approx(2e6 * told[2], rel=1e-6)  # a multiplication and an addition are 2
    cell = torch.nn.LSTM(study.DIM, study.DIM // 2, bidirectional=True)
    weights = sum(p.numel() for p in cell.parameters() if p.ndim == 2)  # each is used once at every place
    (told,) = (row for row in study.counted(64) if row[0] != "self-attention")
    assert told[2] == pytest.approx(64 * weights / 1e6)


def test_likeness_of_heads_and_evenness_of_weights():
    heads, training = importlib.import_module("heads"), importlib.import_module("training")
    same = torch.softmax(torch.randn(2, 1, 3, 5), dim=-1).expand(2, 4, 3, 5)
    assert heads.alike(same) == pytest.approx(1)
    apart = torch.eye(4)[None, :, None, :].expand(2, 4, 3, 4)  # each head looks at a place of its own
    assert heads.alike(apart) == pytest.approx(0, abs=1e-6)
    assert training.entropy(torch.full((2, 3, 4), 0.25)) == pytest.approx(1)
    assert training.entropy(torch.eye(4)[None]) == pytest.approx(0, abs=1e-6)
