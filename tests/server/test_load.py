"""Load on the server with an engine that only keeps time: throughput, added latency, clients that only cost sockets."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from bench.serving import Measured, send
from tests.server.conftest import Start
from tests.server.stub_engine import StubEngine

ROOT = Path(__file__).parents[2]
STREAMS, TOKENS = 256, 64


class Stub:
    """The stub server in a process of its own."""

    def __init__(self, interval: float):
        self.process = subprocess.Popen([sys.executable, "-m", "tests.server.stub_server", "--interval", str(interval)],
                                        stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def stub(request: pytest.FixtureRequest) -> Iterator[Stub]:
    made = Stub(request.param)
    yield made
    made.process.terminate()
    made.process.wait()


async def measure(url: str, max_tokens: int) -> dict[str, Any]:
    """The figures of bench/serving.py, in a process of its own, so that the client's work is not counted as the server's."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "bench/serving.py", "--url", url, "--concurrency", str(STREAMS), "--requests", str(STREAMS),
        "--max-tokens", str(max_tokens), cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    output, _ = await child.communicate()
    return json.loads(output)


@pytest.mark.parametrize("stub", [0.06], indirect=True)
async def test_256_streams(stub: Stub, timing: bool) -> None:
    """A step of 60 ms for 256 streams is 4,267 tokens a second; all tokens of a step are made at the same moment."""
    await measure(stub.url, 4)  # warm
    begin = stub.cpu_seconds()
    figures = await measure(stub.url, TOKENS)
    per_token = (stub.cpu_seconds() - begin) / figures["tokens"]
    print(json.dumps(figures), f"server CPU {per_token * 1e6:.0f} us a token")
    assert not figures["failures"]
    assert figures["tokens"] == STREAMS * TOKENS
    # The last token of a step waits for the other 255: their cost is the latency that the server adds. 39 to 46 us each on an
    # idle machine; a shared one has been seen to take 107.
    assert per_token * STREAMS < (0.025 if timing else 0.05), figures
    if timing:
        assert figures["streamed_tokens_per_second"] > 4000, figures
        assert figures["late_ms"]["p99"] < 25, figures


@pytest.mark.parametrize("stub", [0.01], indirect=True)
@pytest.mark.parametrize("heavy", [
    {"prompt": "some words of text " * 5263, "stream": True},
    {"prompt": [5] * 20_000, "echo": True, "logprobs": 5},
    {"prompt": [5] * 20_000, "echo": True, "logprobs": 5, "stream": True},
    {"prompt": [5] * 20_000, "prompt_logprobs": 5},
], ids=["100k tokens to tokenize", "20k log-probabilities", "streamed", "prompt_logprobs"])
async def test_heavy_requests_do_not_hold_up_a_stream(stub: Stub, heavy: dict[str, Any], timing: bool) -> None:
    """While they are prepared and answered, another stream's tokens come at most 20 ms later than without them."""

    async def stream() -> list[float]:
        measured = Measured()
        await send(stub.url, {"prompt": "x", "max_tokens": 150, "stream": True}, None, measured)
        assert not measured.failures
        return sorted(measured.late)

    await stream()
    alone = await stream()
    busy = asyncio.create_task(stream())
    await asyncio.sleep(0.3)
    async with aiohttp.ClientSession() as session:
        for _ in range(3):
            async with session.post(stub.url + "/v1/completions", json=heavy | {"max_tokens": 1}) as response:
                assert response.status == 200
                while await response.content.read(1 << 16):
                    pass
    beside = await busy
    print(f"latest token alone {alone[-1] * 1e3:.1f} ms, beside heavy requests {beside[-1] * 1e3:.1f} ms")
    assert beside[len(beside) // 2] < alone[len(alone) // 2] + 0.020
    if timing:
        assert beside[-1] < 0.020


async def test_a_thousand_idle_and_slow_clients_do_not_stop_a_normal_one(start: Start, hello: dict[str, Any]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("needs 4096 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    engine = StubEngine()
    engine.script = lambda ids, params, index: "x" * 400 if params.max_tokens == 400 else "Hello"
    engine.delay = 0.01
    running = await start(engine)
    body = json.dumps(hello | {"stream": True, "max_tokens": 400}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    kinds = [b"", b"POST /v1/chat/comp", head % 1000 + b'{"mess', head % len(body) + body]
    writers = [(await running.raw(kinds[number % 4]))[1] for number in range(1000)]
    for _ in range(3):
        begin = time.monotonic()
        status, answer = await running.post("/v1/chat/completions", hello)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello")
        assert time.monotonic() - begin < 5
    for writer in writers:
        writer.close()
    for _ in range(500):
        if running.server.serving.in_flight == 0:
            break
        await asyncio.sleep(0.02)
    assert running.server.serving.in_flight == 0
    assert not engine.active
