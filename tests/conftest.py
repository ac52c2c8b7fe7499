"""Every test: the shapes in the signatures are checked, one thread, a fixed seed.

The checker wraps every function of core and vision, which torch.compile cannot see through: tests marked `compile` are
skipped with it, and run in a process of their own by `VISION_SHAPE_CHECK=0 pytest -m compile`.
"""

from __future__ import annotations

import os

import jaxtyping
import pytest

CHECKED = os.environ.get("VISION_SHAPE_CHECK", "1") != "0"
if CHECKED:  # before anything imports core or vision
    jaxtyping.install_import_hook(["core", "vision"], "beartype.beartype")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if CHECKED:
        for item in items:
            if item.get_closest_marker("compile"):
                item.add_marker(pytest.mark.skip(reason="torch.compile needs VISION_SHAPE_CHECK=0"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def unchecked():
    """Without the checker, as users run: for tests of our own errors about shapes, which it would be quicker to name."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture
def within():
    """`within(actual, reference, tolerance=1e-5)`: max|a - b| <= tolerance * std(reference), and the same shape and dtype."""

    def check(actual: Tensor, reference: Tensor, tolerance: float = 1e-5) -> None:
        assert actual.shape == reference.shape
        assert actual.dtype == reference.dtype
        error = (actual.double() - reference.double()).abs().max() / reference.double().std()
        assert error <= tolerance, f"differs by {error:.3g} of the reference's deviation"

    return check


@pytest.fixture
def perturbed():
    """`perturbed(module)`: every parameter moved off its start, so that zeros and ones cannot hide what they multiply."""

    def perturb(module: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return module

    return perturb
