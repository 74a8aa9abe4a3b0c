"""The online examples run against a server as they are written."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.server.conftest import Start

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "expected"), [
    ("online_batch_completion.py", "'The capital of France is' -> 'Hello, world!' (stop)"),
    ("online_stream_chat.py", "Hello, world!\n"),
])
async def test_example(start: Start, name: str, expected: str) -> None:
    running = await start(api_key=("k",))
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(EXAMPLES / name), "--url", running.url, "--api-key", "k", stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT)
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    assert output.count(expected) >= 1, output
    assert "Traceback" not in output
