"""Runs the prompts of one HTTP request on the engine, measures them, and aborts what the client no longer waits for."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, Protocol

from aiohttp import web
from msgspec import Struct

from zhilight.config.sampling import SamplingParams
from zhilight.engine.outputs import RequestOutput
from zhilight.errors import RequestError
from zhilight.server.openai.errors import APIError
from zhilight.server.openai.prompts import PreparedPrompt
from zhilight.server.openai.serving import SERVING, Serving
from zhilight.server.openai.streaming import DONE, EventStream


def new_request_id(prefix: str, asked: str | None) -> str:
    """The id an answer carries: the client's own behind the prefix, or a fresh one."""
    return f"{prefix}-{asked or uuid.uuid4().hex}"


class Generation:
    """The engine requests of one HTTP request; an async context manager and an iterator of (prompt index, output).

    On leaving the context, requests that have not finished are aborted, whatever the reason: an error, a stop of the server
    or a client that went away (then the handler is cancelled).
    """

    def __init__(self, serving: Serving, prompts: Sequence[PreparedPrompt], params: Sequence[SamplingParams], *,
                 priority: int = 0, cache_salt: str | None = None):
        self._serving = serving
        self._prompts = prompts
        self._params = params
        self._options: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt}
        stem = uuid.uuid4().hex
        self._ids = [f"{stem}-{index}" for index in range(len(prompts))]
        self._unfinished = set(self._ids)
        self._meters = [_Meter(serving, len(prompt.token_ids)) for prompt in prompts]
        self._tasks: list[asyncio.Task] = []
        self._outputs: AsyncGenerator[tuple[int, RequestOutput], None] | None = None

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._outputs is not None:
            await self._outputs.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        unfinished, self._unfinished = self._unfinished, set()
        for meter in self._meters:
            meter.ended_early("rejected" if isinstance(error, RequestError) else
                              "error" if isinstance(error, Exception) and not isinstance(error, ConnectionError) else "abort")
        for request_id in unfinished:
            await asyncio.shield(self._serving.engine.abort(request_id))

    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """All outputs; call it once."""
        self._outputs = self._run(0) if len(self._prompts) == 1 else self._merged()
        return self._outputs

    async def _run(self, index: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        prompt, meter, request_id = self._prompts[index], self._meters[index], self._ids[index]
        outputs = self._serving.engine.generate(prompt.token_ids, self._params[index], request_id, prompt=prompt.text,
                                                **self._options)
        async with aclosing(outputs):
            async for output in outputs:
                meter.add(output)
                if output.finished:
                    self._unfinished.discard(request_id)
                    meter.finish(output)
                self._raise_failure(output)
                yield index, output

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Outputs of all prompts as they come. The queue is short: a slow client holds up the engine's own buffers only."""
        queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(64)

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._run(index)) as outputs:
                    async for item in outputs:
                        await queue.put(item)
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        self._tasks = [asyncio.create_task(pump(index)) for index in range(len(self._prompts))]
        running = len(self._tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item

    @staticmethod
    def _raise_failure(output: RequestOutput) -> None:
        for choice in output.outputs:
            if choice.finish_reason == "error":
                message = output.error or "The request failed inside the engine."
                # A grammar that leaves no token is the request's own doing; the SDKs would repeat a 5xx for nothing.
                raise APIError(500 if output.error_param is None else 400, message, param=output.error_param,
                               code="generation_failed")
            if choice.finish_reason == "abort":
                raise APIError(503, "The request was aborted: the server is shutting down.", code="aborted")


class _Meter:
    """Times and counts of one engine request, fed into the server's metrics."""

    def __init__(self, serving: Serving, prompt_tokens: int):
        self._metrics = serving.metrics
        self._arrival = time.monotonic()
        self._last: dict[int, float] = {}
        self._prompt_tokens = prompt_tokens
        self._generated = 0
        self._done = False

    def add(self, output: RequestOutput) -> None:
        now = time.monotonic()
        for choice in output.outputs:
            if not choice.token_ids:
                continue
            self._generated += len(choice.token_ids)
            last = self._last.get(choice.index)
            if last is not None:
                self._metrics.inter_token_latency.observe(now - last)
            elif not self._last:
                self._metrics.time_to_first_token.observe(now - self._arrival)
            self._last[choice.index] = now

    def finish(self, output: RequestOutput) -> None:
        reasons = [choice.finish_reason for choice in output.outputs if choice.finish_reason]
        self._end(reasons[-1] if reasons else "stop")

    def ended_early(self, reason: str) -> None:
        if not self._done:
            self._end(reason)

    def _end(self, reason: str) -> None:
        self._done = True
        self._metrics.count_outcome(reason)
        if reason != "rejected":
            self._metrics.end_to_end_latency.observe(time.monotonic() - self._arrival)
            self._metrics.prompt_length.observe(self._prompt_tokens)
            self._metrics.generation_length.observe(self._generated)


async def first_of(outputs: AsyncIterator[Any]) -> Any:
    """The first item, so that a refusal is known before headers are sent; None when there is none."""
    with suppress(StopAsyncIteration):
        return await anext(outputs)
    return None


def is_long(outputs: Sequence[RequestOutput]) -> bool:
    """Whether writing these outputs down takes long enough (milliseconds) to belong in the thread pool."""
    return len(outputs) > 64 or any(output.prompt_logprobs is not None for output in outputs)


class Answer(Protocol):
    """What turns the engine's outputs into a route's chunks."""

    include_usage: bool

    def events(self, stream: EventStream, prompt_index: int, output: RequestOutput) -> bytes:
        """The encoded chunks of one output; empty when there is nothing to tell."""

    def usage_chunk(self) -> Struct:
        """The last chunk, when the client asked for usage."""


async def stream_answer(request: web.Request, answer: Answer, generation: Generation) -> web.StreamResponse:
    """Send the chunks of `answer` as they come. Headers wait for the first output, so that a refusal has its own status."""
    outputs = generation.outputs()
    item = await first_of(outputs)
    serving = request.app[SERVING]
    stream = EventStream(request)
    await stream.start()
    try:
        while item is not None:
            events = await serving.in_pool_if(is_long([item[1]]), answer.events, stream, *item)
            if events:
                await stream.send(events)
            item = await first_of(outputs)
    except ConnectionError:
        raise
    except Exception as error:
        return await stream.fail(error)
    last = stream.encode(answer.usage_chunk()) if answer.include_usage else b""
    return await stream.finish(last + DONE)
