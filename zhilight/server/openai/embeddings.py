"""POST /v1/embeddings: the last hidden state of each input's last token, scaled to length 1."""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING

from aiohttp import web

from zhilight.server.openai.body import read_body
from zhilight.server.openai.errors import bad_request
from zhilight.server.openai.prompts import PreparedPrompt, text_prompts, truncate
from zhilight.server.openai.protocol import EmbeddingRequest
from zhilight.server.openai.responses import Embedding, EmbeddingList, EmbeddingUsage
from zhilight.server.openai.serving import SERVING, Serving
from zhilight.server.openai.streaming import json_response

if TYPE_CHECKING:
    import numpy as np

_AT_ONCE = 64
"""Inputs of one request that are in the engine at a time."""


async def embeddings(request: web.Request) -> web.Response:
    serving = request.app[SERVING]
    body = await read_body(request, EmbeddingRequest)
    model = serving.model_name(body.model)
    prompts = await serving.in_pool(_prepare, serving, body)
    gate = asyncio.Semaphore(_AT_ONCE)

    async def embed(prompt: PreparedPrompt) -> np.ndarray:
        async with gate:
            return await serving.engine.embed(prompt.token_ids)

    tasks = [asyncio.create_task(embed(prompt)) for prompt in prompts]
    try:
        vectors = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    data = await serving.in_pool(_encode, vectors, body.encoding_format or "float")
    total = sum(len(prompt.token_ids) for prompt in prompts)
    return json_response(EmbeddingList(data=data, model=model,
                                       usage=EmbeddingUsage(prompt_tokens=total, total_tokens=total)))


def _prepare(serving: Serving, body: EmbeddingRequest) -> list[PreparedPrompt]:
    size = serving.model_config.hidden_size
    if body.dimensions is not None and body.dimensions != size:
        raise bad_request(f"dimensions is {body.dimensions}; this model's embeddings have {size} and cannot be cut.",
                          "dimensions")
    prompts = text_prompts(serving, body.input, param="input", add_special_tokens=body.add_special_tokens is not False)
    prompts = [truncate(serving, prompt, body.truncate_prompt_tokens) for prompt in prompts]
    for prompt in prompts:
        if len(prompt.token_ids) > serving.max_model_len:
            raise bad_request(f"This model's maximum context length is {serving.max_model_len} tokens, and an input has "
                              f"{len(prompt.token_ids)}.", "input", "context_length_exceeded")
    return prompts


def _encode(vectors: list[np.ndarray], encoding: str) -> list[Embedding]:
    import numpy as np

    data = []
    for index, vector in enumerate(vectors):
        vector = np.asarray(vector, dtype=np.float32)
        norm = float(np.linalg.norm(vector))
        vector = vector / norm if norm > 0 else vector
        value = base64.b64encode(vector.astype("<f4").tobytes()).decode() if encoding == "base64" else vector.tolist()
        data.append(Embedding(index=index, embedding=value))
    return data
