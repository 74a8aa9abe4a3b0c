"""Server-sent events: headers held back until the first output, back-pressure, and errors after the start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import msgspec
from aiohttp import web

from zhilight.server.openai.errors import APIError, to_api_error
from zhilight.server.openai.serving import SERVING

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"


class ClientStalled(ConnectionError):
    """The client stopped reading for longer than stall_timeout."""


class EventStream:
    """A stream of `data:` lines.

    `send` waits while the connection's buffer is full, so a client that does not read holds at most that buffer; after
    stall_timeout its connection is cut and the request aborted.
    """

    def __init__(self, request: web.Request):
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)
        self._encoder = msgspec.json.Encoder()
        self._stall_timeout = request.app[SERVING].config.stall_timeout
        self.started = False

    async def start(self) -> None:
        await self._response.prepare(self._request)
        self.started = True

    def encode(self, chunk: msgspec.Struct) -> bytes:
        return b"data: " + self._encoder.encode(chunk) + b"\n\n"

    async def send(self, events: bytes) -> None:
        """Write encoded events in one piece."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client closed the connection")
        if transport.get_write_buffer_size() == 0:  # the usual case: no timer for a client that reads
            await self._response.write(events)
        else:
            await self._in_time(self._response.write(events), transport)

    async def _in_time(self, writing: Coroutine[Any, Any, None], transport: asyncio.WriteTransport) -> None:
        try:
            await asyncio.wait_for(writing, self._stall_timeout)
        except (TimeoutError, asyncio.TimeoutError):
            transport.abort()
            raise ClientStalled(f"the client did not read for {self._stall_timeout} s") from None

    async def fail(self, error: BaseException) -> web.StreamResponse:
        """Tell a client that is already reading that the answer ends here."""
        api_error: APIError = to_api_error(error)
        await self.send(b"event: error\ndata: " + api_error.body() + b"\n\n" + DONE)
        return await self.finish()

    async def finish(self, last: bytes = b"") -> web.StreamResponse:
        if last:
            await self.send(last)
        if self._request.transport is not None:
            with contextlib.suppress(ConnectionError):  # clients may leave as soon as they have read the last event
                await self._in_time(self._response.write_eof(), self._request.transport)
        return self._response


def json_response(body: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")
