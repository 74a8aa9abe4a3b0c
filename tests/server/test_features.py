"""docs/features.md: every test it names exists, every yes names one, every route and field is in it."""

from __future__ import annotations

import re
from pathlib import Path

from zhilight.server.openai.app import ROUTES
from zhilight.server.openai.protocol import ChatCompletionRequest, CompletionRequest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")


def test_named_tests_exist() -> None:
    names = re.findall(r"`((?:tests/)?\w+\.py)::(\w+)`", TEXT)
    assert len(names) > 60
    for file, name in names:
        path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "server" / file
        assert f"def {name}(" in path.read_text(encoding="utf-8"), f"{file}::{name}"


def test_every_yes_and_no_names_a_test() -> None:
    rows = [line for line in TEXT.splitlines() if re.search(r"\| (yes|no)\b", line)]
    assert len(rows) > 45
    for row in rows:
        assert "::test_" in row, row


def test_every_route_and_field_is_listed() -> None:
    for route in ROUTES:
        path = route.path.split("{")[0].rstrip("/") or "/"
        assert path in TEXT or path == "/static", route.path
    fields = {*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    unlisted = {"messages", "prompt", "mm_processor_kwargs", "verbosity", "early_stopping", "guided_decoding_backend"}
    missing = {name for name in fields - unlisted if f"`{name}" not in TEXT and f"{name}`" not in TEXT}
    assert not missing
