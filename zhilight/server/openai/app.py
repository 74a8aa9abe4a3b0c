"""The web application: one table of routes, and what stands around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from zhilight.server.openai import pages, protocol, responses, system, tokens
from zhilight.server.openai.chat import chat_completions
from zhilight.server.openai.completions import completions
from zhilight.server.openai.embeddings import embeddings
from zhilight.server.openai.middlewares import GUARD, PUBLIC, add_headers, make_middlewares
from zhilight.server.openai.serving import SERVING, Serving


@dataclass(frozen=True)
class Route:
    """A route, with what /openapi.json says about it. `public` ones need no key."""

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    summary: str
    request: type | None = None
    response: type | None = None
    public: bool = False
    streams: type | None = None
    page: bool = False


ROUTES = (
    Route("POST", "/v1/chat/completions", chat_completions, "Answer a conversation",
          protocol.ChatCompletionRequest, responses.ChatCompletion, streams=responses.ChatCompletionChunk),
    Route("POST", "/v1/completions", completions, "Continue texts or token ids",
          protocol.CompletionRequest, responses.Completion, streams=responses.Completion),
    Route("POST", "/v1/embeddings", embeddings, "Embed texts or token ids",
          protocol.EmbeddingRequest, responses.EmbeddingList),
    Route("GET", "/v1/models", system.list_models, "List the served models", response=responses.ModelList),
    Route("GET", "/v1/models/{model:.+}", system.show_model, "Show a served model", response=responses.ModelCard),
    Route("POST", "/tokenize", tokens.tokenize, "Text or messages to token ids",
          protocol.TokenizeRequest, responses.TokenizeResponse),
    Route("POST", "/detokenize", tokens.detokenize, "Token ids to text",
          protocol.DetokenizeRequest, responses.DetokenizeResponse),
    Route("GET", "/tokenizer_info", tokens.tokenizer_info, "What the tokenizer is"),
    Route("GET", "/health", system.health, "200 while the engine lives", public=True),
    Route("GET", "/ping", system.health, "The same, by the name that some hosts expect", public=True),
    Route("POST", "/ping", system.health, "The same", public=True),
    Route("GET", "/api/check_health", system.check_health, "The same, for clients of older servers", public=True),
    Route("GET", "/version", system.version, "The server's version", response=responses.VersionResponse, public=True),
    Route("GET", "/metrics", system.metrics, "Metrics for Prometheus", public=True),
    Route("GET", "/openapi.json", pages.openapi, "This description", public=True),
    Route("GET", "/docs", pages.docs, "This description as a page", public=True, page=True),
    Route("GET", "/", pages.playground, "A page to chat with the model", public=True, page=True),
    Route("GET", "/static/{name}", pages.static_file, "Files of the two pages", public=True, page=True),
)


def make_app(serving: Serving) -> web.Application:
    """The application, without a socket. `serving.engine` must be running."""
    config = serving.config
    app = web.Application(middlewares=make_middlewares(config), client_max_size=config.max_body_mb << 20)
    app[SERVING] = serving
    app[GUARD] = []
    routes = [route for route in ROUTES if config.playground or not route.page]
    app[PUBLIC] = {route.handler for route in routes if route.public}
    app[pages.OPENAPI] = pages.describe(routes, config.root_path)
    for prefix in dict.fromkeys(("", config.root_path)):  # proxies may or may not strip the prefix
        for route in routes:
            add = app.router.add_get if route.method == "GET" else app.router.add_post
            add(prefix + route.path, route.handler)
    app.on_response_prepare.append(add_headers)
    return app
