"""POST /tokenize, POST /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from aiohttp import web

from zhilight.server.openai.body import read_body
from zhilight.server.openai.errors import bad_request
from zhilight.server.openai.prompts import check_length, render_chat
from zhilight.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from zhilight.server.openai.responses import DetokenizeResponse, TokenizeResponse
from zhilight.server.openai.sampling import check_token_ids
from zhilight.server.openai.serving import SERVING, Serving
from zhilight.server.openai.streaming import json_response


async def tokenize(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    body = await read_body(request, TokenizeRequest)
    serving.model_name(body.model)
    return json_response(await serving.in_pool(_tokenize, serving, body))


def _tokenize(serving: Serving, body: TokenizeRequest) -> TokenizeResponse:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages.", "prompt")
    if body.messages is not None:
        text, add_special_tokens = render_chat(serving, body, tools=body.tools), bool(body.add_special_tokens)
    else:
        text, add_special_tokens = body.prompt, body.add_special_tokens is not False
    check_length(serving, text, "prompt")
    tokens = serving.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    strings = [serving.tokenizer.token(token) for token in tokens] if body.return_token_strs else None
    return TokenizeResponse(count=len(tokens), max_model_len=serving.max_model_len, tokens=tokens, token_strs=strings)


async def detokenize(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    body = await read_body(request, DetokenizeRequest)
    serving.model_name(body.model)
    return json_response(await serving.in_pool(_detokenize, serving, body))


def _detokenize(serving: Serving, body: DetokenizeRequest) -> DetokenizeResponse:
    check_token_ids("tokens", body.tokens, serving.model_config.vocab_size)
    return DetokenizeResponse(prompt=serving.tokenizer.decode(
        body.tokens, skip_special_tokens=bool(body.skip_special_tokens)))


async def tokenizer_info(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    return json_response(await serving.in_pool(serving.tokenizer.info))
