"""The small routes: models, health, version, metrics."""

from __future__ import annotations

from aiohttp import web

from zhilight.server.openai.errors import APIError
from zhilight.server.openai.metrics import CONTENT_TYPE
from zhilight.server.openai.responses import ModelCard, ModelList, VersionResponse
from zhilight.server.openai.serving import SERVING, Serving
from zhilight.server.openai.streaming import json_response
from zhilight.version import __version__


async def list_models(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    return json_response(ModelList(data=[_card(serving, name) for name in serving.model_names]))


async def show_model(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    return json_response(_card(serving, serving.model_name(request.match_info["model"])))


def _card(serving: Serving, name: str) -> ModelCard:
    return ModelCard(id=name, created=serving.created, root=serving.engine.config.model,
                     max_model_len=serving.max_model_len)


async def health(request: web.Request) -> web.Response:
    """200 with an empty body, or 503 when the engine died or the server is shutting down."""
    serving = request.app[SERVING]
    if serving.engine.dead.is_set():
        raise APIError(503, "The engine died; the server is ending.", code="engine_dead")
    if serving.draining:
        raise APIError(503, "The server is shutting down.", code="shutting_down")
    return web.Response()


async def check_health(request: web.Request) -> web.Response:
    await health(request)
    return json_response({"status": "ok"})


async def version(request: web.Request) -> web.Response:
    return json_response(VersionResponse(version=__version__))


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[SERVING].metrics.text(), headers={"Content-Type": CONTENT_TYPE})
