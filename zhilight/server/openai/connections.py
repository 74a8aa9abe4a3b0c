"""Guards the listening socket: a limit on connections, a deadline for the first headers, dead peers cut off by the kernel."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

from aiohttp import web

from zhilight.server.openai.errors import APIError

if TYPE_CHECKING:
    from zhilight.server.openai.serving import Serving


class ConnectionGuard:
    """Makes the protocol of each connection of `server`. Slow or silent clients cost a socket and nothing else."""

    def __init__(self, server: web.Server, serving: Serving):
        self._server = server
        self._config = serving.config
        self._silent: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        serving.metrics.connections.set_function(lambda: len(server.connections))

    def __call__(self) -> asyncio.Protocol:
        return _Doorway(self)

    def heard(self, protocol: asyncio.BaseProtocol | None) -> None:
        """A whole request head has arrived on this connection."""
        if protocol is not None and (timer := self._silent.pop(protocol, None)) is not None:
            timer.cancel()

    def admit(self, transport: asyncio.Transport) -> None:
        if len(self._server.connections) >= self._config.max_connections:
            _refuse(transport, self._config.max_connections)
            return
        _limit_stall(transport, self._config.stall_timeout)
        handler = self._server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        loop = asyncio.get_running_loop()
        self._silent[handler] = loop.call_later(self._config.header_timeout, self._give_up, handler, transport)

    def _give_up(self, handler: asyncio.BaseProtocol, transport: asyncio.Transport) -> None:
        self._silent.pop(handler, None)
        if not transport.is_closing():
            transport.abort()


class _Doorway(asyncio.Protocol):
    """Stands for the HTTP protocol until the connection is admitted."""

    def __init__(self, guard: ConnectionGuard):
        self._guard = guard

    def connection_made(self, transport: Any) -> None:
        self._guard.admit(transport)


def _refuse(transport: asyncio.Transport, limit: int) -> None:
    body = APIError(503, f"The server has {limit} open connections, its limit. Try again.", code="too_many_connections").body()
    transport.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
                    b"Retry-After: 1\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    transport.close()


def _limit_stall(transport: asyncio.Transport, seconds: float) -> None:
    """Let the kernel cut a peer that acknowledges nothing for `seconds`, also while its receive window is shut."""
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6) \
            and hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
