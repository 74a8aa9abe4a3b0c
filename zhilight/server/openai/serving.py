"""What every route needs: the engine, the settings, the thread pool and the counters of one server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from aiohttp import web

from zhilight.engine.structured import compile_grammar
from zhilight.errors import ConfigError, RequestError
from zhilight.server.config import ServerConfig
from zhilight.server.openai.chat_message import choose_reasoning_parser, choose_tool_parser
from zhilight.server.openai.errors import APIError
from zhilight.server.openai.metrics import ServerMetrics

if TYPE_CHECKING:
    from zhilight.config.engine import EngineConfig
    from zhilight.config.model import ModelConfig
    from zhilight.config.sampling import SamplingParams, StructuredOutput
    from zhilight.engine.client import AsyncEngine
    from zhilight.server.openai.prompts import PreparedPrompt
    from zhilight.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_PRIVATE = {"stop", "bad_words", "structured", "logit_bias", "allowed_token_ids"}


class Serving:
    """State of one server. `draining` is set at shutdown: requests in flight finish, new ones are answered 503."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig):
        self.engine = engine
        self.config = config
        self.model_names = list(config.served_model_name) or [default_model_name(engine.config)]
        self.created = int(time.time())
        self.chat_template = read_chat_template(config.chat_template)
        self.tool_parser = choose_tool_parser(config, self.chat_template or engine.tokenizer.chat_template)
        self.reasoning_parser = choose_reasoning_parser(config)
        self.pool = ThreadPoolExecutor(config.thread_pool_size, thread_name_prefix="prepare")
        self.metrics = ServerMetrics(engine, self.model_names[0])
        self.draining = False
        self.in_flight = 0

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model_config

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def ready(self) -> bool:
        return not self.draining and not self.engine.dead.is_set()

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the vocabulary's longest token: a text longer than that times the context cannot fit it."""
        tokenizer = self.tokenizer
        return max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))

    def default(self, name: str, fallback: Any) -> Any:
        """The value a sampling field takes when the request leaves it out."""
        if self.config.generation_config == "none":
            return fallback
        value = self.model_config.generation_defaults.get(name)
        return fallback if value is None else value

    def model_name(self, asked: str | None) -> str:
        """The name an answer carries; a 404 when the server does not serve `asked`."""
        if not asked:
            return self.model_names[0]
        if asked not in self.model_names:
            raise APIError(404, f"The model {asked!r} does not exist here. Served: {', '.join(self.model_names)}.",
                           param="model", code="model_not_found")
        return asked

    async def in_pool(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run `function` in the thread pool: templates, tokenizing and grammars must not hold up other streams."""
        return await asyncio.get_running_loop().run_in_executor(self.pool, function, *arguments)

    async def in_pool_if(self, long: bool, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run `function` in the thread pool when it takes long, else here: the way there and back costs 0.1 ms."""
        return await self.in_pool(function, *arguments) if long else function(*arguments)

    def check_grammar(self, structured: StructuredOutput, param: str) -> None:
        """Compile the grammar before the request is queued. Raises RequestError naming `param` and what is wrong."""
        try:
            compile_grammar(structured, self.tokenizer, vocab_size=self.model_config.vocab_size,
                            eos_token_ids=self.model_config.eos_token_ids)
        except RequestError as error:
            raise RequestError(str(error), param=param) from error

    def log_request(self, answer_id: str, prompts: Sequence[PreparedPrompt], params: SamplingParams) -> None:
        """One line about a request's size and settings, never its text."""
        if self.config.log_requests:
            lengths = [len(prompt.token_ids) for prompt in prompts]
            settings = {name.name: value for name in fields(params)
                        if (value := getattr(params, name.name)) != name.default and name.name not in _PRIVATE}
            logger.info("%s: prompts of %s tokens, %s", answer_id, lengths[:8], settings)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


SERVING = web.AppKey("serving", Serving)
REQUEST_ID = web.RequestKey("request_id", str)


def default_model_name(config: EngineConfig) -> str:
    """The model as it was asked for, as vLLM does: a folder's path without a trailing slash, a hub name, or "demo"."""
    return config.model.rstrip("/") or config.model


def read_chat_template(source: str | None) -> str | None:
    """A chat template's text: `source` is a file, or already the text. Raises ConfigError."""
    if source is None or "{%" in source or "{{" in source:
        return source
    try:
        return Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"chat_template is {source!r}: neither a readable file nor Jinja text ({error}).") from error
