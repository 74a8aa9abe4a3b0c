"""/openapi.json, made from the route table and the msgspec structs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from zhilight.server.openai.errors import ErrorResponse
from zhilight.version import __version__

if TYPE_CHECKING:
    from zhilight.server.openai.app import Route

_COMPONENT = "#/components/schemas/{name}"
_ERRORS = {"400": "A value is bad, or a known field cannot be honoured", "401": "No valid key",
           "404": "No such model or route", "408": "The body took too long", "413": "The body is too large",
           "415": "The body is not JSON", "500": "The server's own fault", "503": "Busy or shutting down"}


def describe(routes: Sequence[Route], root_path: str) -> dict[str, Any]:
    """The OpenAPI 3.1 description of `routes`."""
    kinds = list(dict.fromkeys(kind for route in routes for kind in (route.request, route.response, route.streams)
                               if kind is not None))
    schemas, components = msgspec.json.schema_components([*kinds, ErrorResponse], ref_template=_COMPONENT)
    schema_of = dict(zip([*kinds, ErrorResponse], schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        if not route.page:
            path = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.path)
            paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "ZhiLight", "version": __version__, "description": "OpenAI-compatible API of a ZhiLight server."},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route, path: str, schema_of: dict[type, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.response is not None:
        content["application/json"] = {"schema": schema_of[route.response]}
    if route.streams is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event": schema_of[route.streams]}
    answer: dict[str, Any] = {"description": "Answer"}
    if content:
        answer["content"] = content
    error = {"application/json": {"schema": schema_of[ErrorResponse]}}
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{re.sub(r'[^a-z]+', '_', path.lower()).strip('_') or 'root'}",
        "summary": route.summary,
        "responses": {"200": answer, **{status: {"description": text, "content": error}
                                        for status, text in _ERRORS.items()}},
    }
    if names := re.findall(r"\{(\w+)\}", path):
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                                   for name in names]
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": {
            "application/json": {"schema": schema_of[route.request]}}}
    if not route.public:
        operation["security"] = [{"key": []}, {}]
    return operation
