"""Around every route: request ids, CORS, keys, errors as JSON, the access log."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from zhilight.server.config import ServerConfig
from zhilight.server.openai.connections import ConnectionGuard
from zhilight.server.openai.errors import APIError, error_response
from zhilight.server.openai.serving import REQUEST_ID, SERVING

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
access_logger = logging.getLogger("zhilight.server.access")
GUARD = web.AppKey("guard", list)
"""Holds the ConnectionGuard once the server listens."""
PUBLIC = web.AppKey("public", set)
"""Handlers that answer without a key."""


@web.middleware
async def outermost(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give the request its id, turn exceptions into OpenAI errors, count and log."""
    started = time.monotonic()
    for guard in request.app[GUARD]:
        guard.heard(request.protocol)
    request[REQUEST_ID] = _request_id(request)
    serving = request.app[SERVING]
    serving.in_flight += 1
    status = 499  # the client went away before there was an answer
    try:
        try:
            response = await handler(request)
        except ConnectionError:  # nobody is left to answer; what is returned goes nowhere
            return web.Response(status=status)
        except Exception as error:
            response = error_response(error)
        status = response.status
        return response
    finally:
        serving.in_flight -= 1
        route = request.match_info.route.resource
        serving.metrics.count_http(_method(request), route.canonical if route else "unknown", status)
        if serving.config.access_log:
            access_logger.info('%s "%s %s" %d %.1f ms %s', request.remote or "-", request.method,
                               _printable(request.path), status, (time.monotonic() - started) * 1e3, request[REQUEST_ID])


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler, because headers of a stream are sent before its handler returns."""
    response.headers["Server"] = "zhilight"
    response.headers["X-Request-Id"] = request.get(REQUEST_ID) or uuid.uuid4().hex
    origin = request.headers.get("Origin")
    if origin:
        response.headers.update(_cors_headers(request.app[SERVING].config, origin))


@web.middleware
async def cors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers preflights; they carry no key."""
    if request.method == "OPTIONS" and "Origin" in request.headers \
            and "Access-Control-Request-Method" in request.headers:
        config = request.app[SERVING].config
        allowed = _cors_headers(config, request.headers["Origin"])
        if not allowed:
            raise APIError(400, "This origin is not allowed (--allowed-origins).", code="origin_not_allowed")
        asked = request.headers.get("Access-Control-Request-Headers", "")
        methods = "GET, POST, OPTIONS" if "*" in config.allowed_methods else ", ".join(config.allowed_methods)
        headers = asked if "*" in config.allowed_headers else ", ".join(config.allowed_headers)
        return web.Response(status=204, headers={"Access-Control-Allow-Methods": methods, "Access-Control-Max-Age": "600",
                                                 "Access-Control-Allow-Headers": headers})
    return await handler(request)


def _cors_headers(config: ServerConfig, origin: str) -> dict[str, str]:
    anyone = "*" in config.allowed_origins
    if not anyone and origin not in config.allowed_origins:
        return {}
    # With credentials a browser takes no wildcard: the origin itself must be named.
    headers = {"Access-Control-Allow-Origin": "*" if anyone and not config.allow_credentials else origin,
               "Access-Control-Expose-Headers": "X-Request-Id"}
    if headers["Access-Control-Allow-Origin"] != "*":
        headers["Vary"] = "Origin"
    if config.allow_credentials:
        headers["Access-Control-Allow-Credentials"] = "true"
    return headers


def make_authentication(keys: tuple[str, ...]) -> Callable:
    """Checks `Authorization: Bearer KEY` in constant time; digests make the lengths equal."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @web.middleware
    async def authentication(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not digests or request.match_info.handler in request.app[PUBLIC]:
            return await handler(request)
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        presented = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(presented, digest) for digest in digests]
        if kind.lower() != "bearer" or not any(matches):
            raise APIError(401, "A valid key is needed: send `Authorization: Bearer KEY`.", code="invalid_api_key",
                           headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    return authentication


@web.middleware
async def availability(request: web.Request, handler: Handler) -> web.StreamResponse:
    """No new work for an engine that is dead or draining."""
    serving = request.app[SERVING]
    if request.method == "POST" and not serving.ready:
        what = "The engine died" if serving.engine.dead.is_set() else "The server is shutting down"
        raise APIError(503, f"{what}; send the request elsewhere.", code="shutting_down",
                       headers={"Retry-After": "5", "Connection": "close"})
    return await handler(request)


def make_middlewares(config: ServerConfig) -> list[Callable]:
    return [outermost, cors, make_authentication(config.api_key), availability]


def set_guard(app: web.Application, guard: ConnectionGuard) -> None:
    app[GUARD].append(guard)


def _request_id(request: web.Request) -> str:
    given = request.headers.get("X-Request-Id", "")
    if 0 < len(given) <= 128 and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def _method(request: web.Request) -> str:
    """One of a few methods: a client must not be able to fill the metrics with names of its own."""
    return request.method if request.method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH") else "other"


def _printable(path: str) -> str:
    return path[:200].encode("ascii", "backslashreplace").decode().translate(dict.fromkeys(range(32), "?"))
