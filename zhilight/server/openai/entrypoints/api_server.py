"""Starts a server: `python -m zhilight.server.openai.entrypoints.api_server --model-path MODEL`, or `zhilight serve MODEL`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from zhilight.config.engine import EngineConfig
from zhilight.errors import ConfigError, ZhiLightError
from zhilight.server.arguments import configs_from, make_server_parser, normalise_flags
from zhilight.server.config import ServerConfig
from zhilight.server.openai.app import make_app
from zhilight.server.openai.chat_message import choose_reasoning_parser, choose_tool_parser
from zhilight.server.openai.connections import ConnectionGuard
from zhilight.server.openai.middlewares import set_guard
from zhilight.server.openai.serving import Serving, read_chat_template
from zhilight.version import __version__

if TYPE_CHECKING:
    from zhilight.engine.client import AsyncEngine

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_DEAD_GRACE = 2.0
"""Seconds that answers in flight and /health get to tell clients that the engine died."""


class Server:
    """An HTTP server around a running engine."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig):
        self.engine = engine
        self.config = config
        self.serving = Serving(engine, config)
        self._runner: web.AppRunner | None = None
        self._listeners: list[asyncio.AbstractServer] = []
        self.port = config.port

    async def start(self, sock: socket.socket) -> None:
        """Serve on `sock`, a bound socket (see `bind`)."""
        config = self.config
        app = make_app(self.serving)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None,
                               keepalive_timeout=config.keepalive_timeout, auto_decompress=False, shutdown_timeout=0.2)
        await runner.setup()
        self._runner = runner
        guard = ConnectionGuard(runner.server, self.serving)
        set_guard(app, guard)
        loop = asyncio.get_running_loop()
        tls = make_tls(config)
        if config.uds:
            listener = await loop.create_unix_server(guard, sock=sock, ssl=tls, backlog=_BACKLOG)
        else:
            self.port = sock.getsockname()[1]
            listener = await loop.create_server(guard, sock=sock, ssl=tls, backlog=_BACKLOG)
        self._listeners.append(listener)
        await self.serving.in_pool(getattr, self.serving, "longest_token")
        for what, parser in (("tool calls", self.serving.tool_parser), ("reasoning", self.serving.reasoning_parser)):
            if parser is not None:
                logger.info("%s are read by %s", what, parser.__name__)

    @property
    def address(self) -> str:
        if self.config.uds:
            return f"unix:{self.config.uds}"
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{'https' if self.config.ssl_certfile else 'http'}://{host}:{self.port}{self.config.root_path}"

    async def stop(self, *, drain: float) -> None:
        """Refuse new work, let requests in flight finish for `drain` seconds, then close."""
        self.serving.draining = True
        for listener in self._listeners:
            listener.close()
        if drain > 0 and not self.engine.dead.is_set():
            deadline = asyncio.get_running_loop().time() + drain
            await self.engine.drain(drain)
            while self.serving.in_flight and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.02)
        if self.serving.in_flight:
            logger.warning("%d HTTP requests were cut off at shutdown", self.serving.in_flight)
        if self._runner is not None:
            await self._runner.cleanup()
        self.serving.close()
        if self.config.uds:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.config.uds)


def bind(config: ServerConfig) -> socket.socket:
    """The listening socket, bound before the model is loaded: a taken port is known at once. Raises ConfigError."""
    if config.uds:
        return _bind_unix(config.uds)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"host is {config.host!r}: {error.strerror}.") from error
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {error.strerror}. "
                          "Choose another --port, or stop what uses this one.") from error
    return sock


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with probe:
                if probe.connect_ex(path) == 0:
                    raise ConfigError(f"uds is {path!r}: another server listens there. Choose another path.")
            if _is_socket(path):
                os.unlink(path)  # left over from a server that was killed
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"uds is {path!r}: {error.strerror or error}.") from error
    return sock


def _is_socket(path: str) -> bool:
    import stat

    return stat.S_ISSOCK(os.stat(path).st_mode)


def make_tls(config: ServerConfig) -> ssl.SSLContext | None:
    if not config.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs:
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ssl_certfile {config.ssl_certfile!r} and ssl_keyfile {config.ssl_keyfile!r} cannot be used: "
                          f"{error}.") from error
    return context


def check(config: ServerConfig) -> None:
    """What can be known to be wrong before a model is loaded. Raises ConfigError."""
    make_tls(config)
    choose_tool_parser(config, read_chat_template(config.chat_template))
    choose_reasoning_parser(config)


async def serve(engine_config: EngineConfig, config: ServerConfig) -> int:
    """Run until a signal or the engine's death; returns the exit code."""
    from zhilight.engine.client import AsyncEngine

    check(config)
    sock = bind(config)
    stop = _watch_signals()
    starting = asyncio.ensure_future(AsyncEngine.start(engine_config))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting}, timeout=5)
        logger.info("stopped while the engine was starting")
        return 0
    stopping.cancel()
    engine = starting.result()
    try:
        server = Server(engine, config)
        await server.start(sock)
        logger.info("ZhiLight %s serves %s at %s (context %d tokens)", __version__,
                    ", ".join(server.serving.model_names), server.address, engine.max_model_len)
        return await _until_the_end(server, stop, engine_config.drain_timeout)
    finally:
        await engine.close()


async def _until_the_end(server: Server, stop: asyncio.Event, drain_timeout: float) -> int:
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, server.engine.dead)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    if server.engine.dead.is_set():
        logger.error("the engine died; the server ends")
        await asyncio.sleep(_DEAD_GRACE)
        await server.stop(drain=0)
        return 1
    logger.info("shutting down: %d requests get up to %.0f s to finish", server.serving.in_flight, drain_timeout)
    stop.clear()
    again = asyncio.ensure_future(stop.wait())
    stopping = asyncio.ensure_future(server.stop(drain=drain_timeout))
    await asyncio.wait({again, stopping, waits[1]}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():  # a second signal, or the engine died while draining
        stopping.cancel()
        await asyncio.wait({stopping})
        await server.stop(drain=0)
    return 1 if server.engine.dead.is_set() else 0


def _watch_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


class _ClientFaults(logging.Filter):
    """Drops aiohttp's tracebacks about what clients send: they got their 4xx, and could fill the log otherwise."""

    def filter(self, record: logging.LogRecord) -> bool:
        fault = record.exc_info[1] if record.exc_info else None
        return not isinstance(fault, (HttpProcessingError, web.RequestPayloadError, ConnectionError))


def run_server(engine_config: EngineConfig, config: ServerConfig) -> int:
    """`serve` in an event loop of its own (uvloop where there is one); returns the exit code."""
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("aiohttp.server").addFilter(_ClientFaults())
    _raise_file_limit(config.max_connections + 512)
    # A thread that renders a template must not keep the loop from a token for the default 5 ms.
    sys.setswitchinterval(0.001)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(serve(engine_config, config))
    return uvloop.run(serve(engine_config, config))


def _raise_file_limit(wanted: int) -> None:
    """Each connection is a file: lift the soft limit as far as the hard one allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
        if limit < wanted:
            logger.warning("at most %d files may be open, fewer than --max-connections asks for", limit)


def main(argv: Sequence[str] | None = None) -> int:
    words = normalise_flags(sys.argv[1:] if argv is None else argv)
    try:
        arguments = make_server_parser("python -m zhilight.server.openai.entrypoints.api_server").parse_args(words)
        return run_server(*configs_from(arguments))
    except ZhiLightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
