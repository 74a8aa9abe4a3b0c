"""HTTP load on a running server, bounded in time: tokens per second, time to first token, inter-token latency.

    python bench/serving.py --url http://127.0.0.1:8000 --concurrency 64 --requests 256 --max-tokens 128

Keeps `concurrency` streams of /v1/completions open until `requests` have been sent, or sends `rate` requests a second
(Poisson arrivals). The client is a few lines over raw sockets, so that it does not become what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

_TIME = re.compile(rb'"(?:text|content)":"(\d+\.\d{6}) "')
_USAGE = re.compile(rb'"completion_tokens":(\d+)')


@dataclass
class Measured:
    """Times in seconds; an event may carry several tokens.

    tokens: what the server's usage says. late: how long after it was made a token arrived, when its text is that time.
    """

    ttft: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    tokens: int = 0
    failures: dict[str, int] = field(default_factory=dict)


class Stream(asyncio.Protocol):
    """One request on one connection; reads the events of its answer as they arrive."""

    def __init__(self, request: bytes, measured: Measured):
        self._request = request
        self._measured = measured
        self._last = 0.0
        self._rest = b""
        self._begin = 0.0
        self._headers_read = False
        self.done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._begin = time.monotonic()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not self._headers_read:
            self._headers_read = True
            status = data[9:12].decode("ascii", "replace")
            if status != "200":
                self._end(f"status {status}")
                return
        data = self._rest + data
        events, _, self._rest = data.rpartition(b"\n\n")
        count = events.count(b'"text":"') - events.count(b'"text":""')
        if count:
            measured = self._measured
            if self._last:
                measured.between += [(now - self._last) / count] * count
            else:
                measured.ttft.append(now - self._begin)
                measured.between += [0.0] * (count - 1)
            self._last = now
            measured.late += [now - float(stamp) for stamp in _TIME.findall(events)]
        if usage := _USAGE.search(data):
            self._measured.tokens += int(usage[1])
        if b"[DONE]" in data:
            self._measured.whole.append(now - self._begin)
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"connection lost: {error}")

    def _end(self, failure: str | None) -> None:
        if not self.done.done():
            self.done.set_result(failure)
        self._transport.close()


async def send(url: str, body: dict, key: str | None, measured: Measured) -> None:
    parts = urlsplit(url)
    content = json.dumps(body).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    request = (f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}"
               f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n").encode() + content
    loop = asyncio.get_running_loop()
    try:
        _, stream = await loop.create_connection(lambda: Stream(request, measured), parts.hostname, parts.port or 80,
                                                 ssl=parts.scheme == "https" or None)
        failure = await stream.done
    except OSError as error:
        failure = f"connection failed: {error}"
    if failure:
        measured.failures[failure] = measured.failures.get(failure, 0) + 1


async def load(arguments: argparse.Namespace) -> tuple[Measured, float]:
    """Run the load; the measurements and how long it took, seconds."""
    measured = Measured()
    randomness = random.Random(arguments.seed)
    gate = asyncio.Semaphore(arguments.concurrency)

    async def one() -> None:
        async with gate:
            prompt = [randomness.randrange(10, 200) for _ in range(arguments.prompt_tokens)]
            await send(arguments.url, {"prompt": prompt, "max_tokens": arguments.max_tokens, "ignore_eos": True,
                                       "temperature": 0, "stream": True, "model": arguments.model,
                                       "stream_options": {"include_usage": True}},
                       arguments.api_key, measured)

    begin = time.monotonic()
    tasks = []
    for _ in range(arguments.requests):
        tasks.append(asyncio.create_task(one()))
        if arguments.rate:
            await asyncio.sleep(randomness.expovariate(arguments.rate))
    _, late = await asyncio.wait(tasks, timeout=arguments.time_limit)
    for task in late:
        task.cancel()
    if late:
        measured.failures["not finished within the time limit"] = len(late)
    return measured, time.monotonic() - begin


def summary(measured: Measured, seconds: float) -> dict:
    """Figures in milliseconds where the name says so. Streamed tokens a second leave the time to the first token out."""
    result: dict = {"seconds": round(seconds, 2), "requests": len(measured.whole), "tokens": measured.tokens,
                    "tokens_per_second": round(measured.tokens / seconds, 1), "failures": measured.failures}
    if measured.whole:
        streaming = max(measured.whole) - min(measured.ttft)
        result["streamed_tokens_per_second"] = round(measured.tokens / max(streaming, 1e-9), 1)
    for name in ("ttft", "between", "whole", "late"):
        values = sorted(asdict(measured)[name])
        if values:
            result[name + "_ms"] = {f"p{share}": round(values[min(len(values) - 1, len(values) * share // 100)] * 1e3, 2)
                                    for share in (50, 90, 99)}
    return result


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, without /v1")
    parser.add_argument("--model", help="served model name; default: the server's first")
    parser.add_argument("--api-key")
    parser.add_argument("--concurrency", type=int, default=64, help="streams open at once")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rate", type=float, help="requests a second, Poisson; default: as many as concurrency allows")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds after which open streams are given up")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        import uvloop
        measured, seconds = uvloop.run(load(arguments))
    except ImportError:
        measured, seconds = asyncio.run(load(arguments))
    print(json.dumps(summary(measured, seconds), indent=1))
    return 1 if measured.failures or not measured.whole else 0


if __name__ == "__main__":
    sys.exit(main())
