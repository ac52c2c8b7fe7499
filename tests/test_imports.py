"""Who may import whom, who may call the softmax, and what `import vision` costs."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import jaxtyping
import pytest
import torch

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "core").rglob("*.py"), *(ROOT / "vision").rglob("*.py")])

# What each part may import of the project: core <- vision.models <- {weights, inference} <- tasks <- the command line.
# `errors` is for all of vision; the data and the tasks agree on a batch type and do not know each other.
BELOW = {
    "core": {"core"},
    "vision.errors": set(),
    "vision.models": {"core", "vision.errors"},
    "vision.weights": {"core", "vision.errors", "vision.models"},
    "vision.inference": {"core", "vision.errors", "vision.models"},
    "vision.data": {"core", "vision.errors"},
    "vision.tasks": {"core", "vision.errors", "vision.models", "vision.weights", "vision.inference"},
}
# Single files beside the layers: each says here which layer it belongs to.
SIDES = {
    "vision.vocabulary": "vision.errors",
    "vision.hub": "vision.errors",
    "vision.optim": "vision.tasks",
    "vision.losses": "vision.tasks",
    "vision.metrics": "vision.tasks",
    "vision.rebuild": "vision.weights",
    "vision.create": "vision.weights",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imported(path: Path) -> set[str]:
    """Full names of all modules a file imports, those in functions and under TYPE_CHECKING too."""
    found = set()
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def part(name: str) -> str | None:
    """The layer a module belongs to: `core`, `vision.models`, ...; None for the command line and everything above the layers."""
    head = "core" if name.split(".")[0] == "core" else ".".join(name.split(".")[:2])
    head = SIDES.get(head, head)
    return head if head in BELOW else None


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


LAYERED = [path for path in FILES if part(module_name(path))]


@pytest.mark.parametrize("path", LAYERED, ids=ids)
def test_imports_go_one_way(path):
    own = part(module_name(path))
    allowed = BELOW[own] | {own}
    ours = {name for name in imported(path) if name.split(".")[0] in ("core", "vision")}
    wrong = {name for name in ours if part(name) not in allowed}
    assert not wrong, f"{own} may import {sorted(allowed)}, not {sorted(wrong)}"


def test_one_way_is_what_the_table_says():
    """The table itself has no cycle: every layer stands above all that it imports."""
    order = list(BELOW)
    for layer, below in BELOW.items():
        assert all(order.index(other) < order.index(layer) for other in below - {layer})
    assert "vision.data" not in BELOW["vision.tasks"]
    assert not BELOW["vision.data"] & {"vision.models", "vision.tasks"}


@pytest.mark.parametrize("path", [p for p in FILES if part(module_name(p)) == "core"], ids=ids)
def test_core_needs_torch_einops_and_jaxtyping_only(path):
    outside = {name.split(".")[0] for name in imported(path)} - {"core", "torch", "einops", "jaxtyping", "__future__"}
    assert not outside - sys.stdlib_module_names


def is_there(name: str) -> bool:
    """A module, or what a module holds."""
    module, _, held = name.rpartition(".")
    if not module:
        return importlib.util.find_spec(name) is not None
    found = importlib.import_module(module) if is_there(module) else None
    return hasattr(found, held) or (hasattr(found, "__path__") and importlib.util.find_spec(name) is not None)


def test_issues_basicsr_649_663_all_that_is_imported_is_there():
    """Newer torchvisions have no `transforms.functional_tensor`: BasicSR #649, #663, pull requests #624, #667, #748.

    Also what is imported within functions, of the packages that are installed.
    """
    names = {name for path in FILES for name in imported(path)} - {"__future__.annotations"}
    installed = {name for name in names if importlib.util.find_spec(name.split(".")[0]) is not None}
    assert {"torch", "torchvision", "timm", "lightning", "core", "vision"} <= {name.split(".")[0] for name in installed}
    assert [name for name in sorted(installed) if not is_there(name)] == []
    assert not is_there("torchvision.transforms.functional_tensor.rgb_to_grayscale")


# Calls that turn scores into weights. A task may take the softmax of logits (probabilities of classes), a model may not.
SOFTMAXES = {"softmax", "Softmax", "Softmax2d", "gumbel_softmax", "softmin"}
ATTENTIONS = {"scaled_dot_product_attention", "flex_attention", "MultiheadAttention", "multi_head_attention_forward"}


def names(path: Path) -> set[str]:
    used = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree(path)) if isinstance(node, ast.Name)}
    return used | {name.rpartition(".")[2] for name in imported(path)}


# What the benchmark measures ours against is not ours: a peer may call what it likes, and only the benchmark may call a peer.
PEERS = ROOT / "vision" / "bench" / "peers"


@pytest.mark.parametrize("path", [p for p in FILES if ids(p) != "core/attention.py" and PEERS not in p.parents], ids=ids)
def test_attention_is_computed_in_one_file(path):
    forbidden = ATTENTIONS | (SOFTMAXES if part(module_name(path)) in ("core", "vision.models") else set())
    assert not names(path) & forbidden


def test_peers_are_the_benchmarks_alone():
    users = {path for path in FILES if any(name.startswith("vision.bench.peers") for name in imported(path))}
    assert users
    assert all(PEERS.parent in path.parents for path in users)


def test_attention_file_has_both_paths():
    assert {"softmax", "scaled_dot_product_attention"} <= names(ROOT / "core" / "attention.py")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    return done.stdout.strip()


def test_import_vision_is_light():
    """Under 0.1 s (the best of three: others use this machine too), and nothing heavy is loaded."""
    code = (
        "import sys, time; start = time.perf_counter(); import vision; took = time.perf_counter() - start;"
        "heavy = {'torch', 'numpy', 'PIL', 'lightning', 'timm', 'matplotlib', 'core'} & set(sys.modules);"
        "print(took, sorted(heavy))"
    )
    runs = [run(code).split(" ", 1) for _ in range(3)]
    assert all(heavy == "[]" for _, heavy in runs)
    assert min(float(took) for took, _ in runs) < 0.1


def test_core_loads_nothing_of_vision():
    code = "import sys, core; print(sorted({'vision', 'lightning', 'timm', 'torchvision', 'PIL', 'yaml'} & set(sys.modules)))"
    assert run(code) == "[]"


@pytest.mark.skipif(os.environ.get("VISION_SHAPE_CHECK") == "0", reason="the checker is off")
def test_shapes_in_signatures_are_checked():
    """The checker of `conftest.py` names the argument, the shape it has and the one it should have."""
    from core import attend

    with pytest.raises(jaxtyping.TypeCheckError, match=r"parameter 'k'.*\n.*f32\[2,3,4,6\].*\n.*b kv_heads k e"):
        attend(torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 6), torch.randn(2, 3, 4, 5))


@pytest.mark.parametrize("file", sorted((ROOT / "vision" / "models").glob("*.py")), ids=lambda file: file.stem)
def test_a_model_is_a_file_that_one_can_read(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 250
