"""/openapi.json, the pages at / and /docs, and their files: static, without a build step or a foreign host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from zhilight.server.openai.errors import APIError
from zhilight.server.openai.openapi import describe as describe_api

if TYPE_CHECKING:
    from zhilight.server.openai.app import Route

OPENAPI = web.AppKey("openapi", bytes)
_FOLDER = Path(__file__).parent / "playground"
_FILES = {"app.js": "text/javascript", "charts.js": "text/javascript", "docs.js": "text/javascript",
          "style.css": "text/css"}
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}


def describe(routes: Sequence[Route], root_path: str) -> bytes:
    return msgspec.json.encode(describe_api(routes, root_path))


async def openapi(request: web.Request) -> web.Response:
    return web.Response(body=request.app[OPENAPI], content_type="application/json")


async def playground(request: web.Request) -> web.Response:
    return _file("index.html", "text/html")


async def docs(request: web.Request) -> web.Response:
    return _file("docs.html", "text/html")


async def static_file(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in _FILES:
        raise APIError(404, "There is no such file.", code="route_not_found")
    return _file(name, _FILES[name])


def _file(name: str, content_type: str) -> web.Response:
    headers: dict[str, Any] = dict(_PAGE_HEADERS)
    return web.Response(body=_content(name), content_type=content_type, charset="utf-8", headers=headers)


@cache
def _content(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()
