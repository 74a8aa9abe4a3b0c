"""A server around an engine that only keeps time: `python -m tests.server.stub_server --interval 0.05`.

Each running stream gets one token a step, all at the same moment, as from a real decode step. A token's text is the time
it was made (time.monotonic, which all processes of a machine share), so that a client can tell how late it comes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from tests.server.stub_engine import StubEngine
from zhilight.config.sampling import SamplingParams
from zhilight.engine.outputs import CompletionOutput, RequestOutput
from zhilight.server.config import ServerConfig
from zhilight.server.openai.entrypoints.api_server import Server, _raise_file_limit, bind


class Clockwork(StubEngine):
    """Emits params.max_tokens tokens a request, one a step of `interval` seconds; 0 is as fast as it goes."""

    def __init__(self, interval: float):
        super().__init__(max_model_len=200_000)
        self._interval = interval
        self._made = ""
        self._step = asyncio.Event()

    async def run(self) -> None:
        next_step = time.monotonic()
        while True:
            next_step = max(next_step + self._interval, time.monotonic())
            await asyncio.sleep(next_step - time.monotonic())
            self._made = f"{time.monotonic():.6f} "
            step, self._step = self._step, asyncio.Event()
            step.set()

    async def generate(self, prompt_token_ids: list[int], params: SamplingParams, request_id: str, *,
                       prompt: str | None = None, priority: int = 0,
                       cache_salt: str | None = None) -> AsyncIterator[RequestOutput]:
        self.active.add(request_id)
        total = params.max_tokens or 64
        scores = None
        if params.prompt_logprobs is not None:
            scores = [None, *[self.position(7, params.prompt_logprobs)] * (len(prompt_token_ids) - 1)]
        try:
            for number in range(total):
                await self._step.wait()
                last = number == total - 1
                choice = CompletionOutput(index=0, text=self._made, token_ids=[7], finish_reason="length" if last else None)
                yield RequestOutput(request_id=request_id, prompt_token_ids=prompt_token_ids, outputs=[choice], finished=last,
                                    prompt_logprobs=scores)
                scores = None
        finally:
            self.active.discard(request_id)


async def main(arguments: argparse.Namespace) -> None:
    engine = Clockwork(arguments.interval)
    ticking = asyncio.create_task(engine.run())
    config = ServerConfig(host="127.0.0.1", port=arguments.port, access_log=False)
    server = Server(engine, config)  # type: ignore[arg-type]
    await server.start(bind(config))
    print(server.port, flush=True)
    await ticking


def _arguments() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--interval", type=float, default=0.05)
    parser.add_argument("--port", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    _raise_file_limit(8192)
    sys.setswitchinterval(0.001)
    try:
        import uvloop
        uvloop.run(main(_arguments()))
    except ImportError:
        asyncio.run(main(_arguments()))
