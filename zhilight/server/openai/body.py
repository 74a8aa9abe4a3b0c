"""Reads and decodes request bodies."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from zhilight.server.openai.errors import APIError, bad_request
from zhilight.server.openai.serving import SERVING, Serving

_INLINE_BYTES = 16384
"""Bodies up to this size are decoded on the spot (about 50 us); larger ones in the thread pool."""

Body = TypeVar("Body")


@cache
def _decoder(kind: type) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    """The request's JSON body as `kind`. Raises APIError 400, 408, 413 or 415, and msgspec's errors."""
    serving: Serving = request.app[SERVING]
    content_type = request.content_type
    if "Content-Type" in request.headers and content_type not in ("application/json", "application/octet-stream") \
            and not content_type.endswith("+json"):
        raise APIError(415, f"The body has the content type {content_type!r}; send application/json.")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise APIError(415, "Compressed bodies are not taken: they could grow without limit. Send the JSON itself.")
    try:
        raw = await asyncio.wait_for(request.read(), serving.config.body_timeout)
    except (TimeoutError, asyncio.TimeoutError):
        raise APIError(408, f"The body did not arrive within {serving.config.body_timeout} s.",
                       headers={"Connection": "close"}) from None
    except web.RequestPayloadError as error:
        raise bad_request(f"The body could not be read: {error}.") from error
    if not raw:
        raise bad_request("The body is empty; send a JSON object.", code="invalid_json")
    if len(raw) <= _INLINE_BYTES:
        return _decoder(kind).decode(raw)
    return await serving.in_pool(_decoder(kind).decode, raw)
