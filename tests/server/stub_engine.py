"""An engine with the face of AsyncEngine that says what a test tells it to say."""

from __future__ import annotations

import asyncio
import codecs
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from zhilight.config.engine import EngineConfig
from zhilight.config.model import ModelConfig, RopeConfig
from zhilight.config.sampling import SamplingParams
from zhilight.engine.messages import EngineStats
from zhilight.engine.outputs import (
    CompletionOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    TokenLogprob,
)
from zhilight.errors import EngineDead
from zhilight.tokenization.tokenizer import Tokenizer, TokenizerSettings

CHATML = (
    "{% for message in messages %}"
    "{% if message.role == 'user' and message.content == 'raise' %}{{ raise_exception('no such talk') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{% if message.content is not none %}{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}:"
    "{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }};{% endfor %}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if documents %}{{ documents | length }} documents{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """A byte-level tokenizer: ids 0 to 255 are bytes, then three special tokens, then a few words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    from_byte = dict(enumerate(_byte_chars()))
    vocab = {from_byte[byte]: byte for byte in range(256)}
    assert sorted(vocab) == alphabet
    backend = Backend(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False)
                                for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    # "e" again, as an added token: an id that reads like another one.
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return Tokenizer(backend, TokenizerSettings({"eos_token": "<|im_end|>"}, chat_templates={"default": CHATML}))


def _byte_chars() -> list[str]:
    """GPT-2's map from bytes to printable characters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = itertools.count(256)
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


EOS = 258


class StubEngine:
    """`script(prompt_token_ids, params, index)` gives the text (or token ids) of choice `index`."""

    def __init__(self, *, max_model_len: int = 4096, config: EngineConfig | None = None):
        self.config = config or EngineConfig(model="stub-model")
        self.tokenizer = make_tokenizer()
        self.model_config = ModelConfig(
            architecture="Stub", vocab_size=264, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
            num_kv_heads=1, head_dim=8, rms_norm_eps=1e-5, max_position_embeddings=max_model_len, rope=RopeConfig(),
            eos_token_ids=(EOS,))
        self.max_model_len = max_model_len
        self.dead = asyncio.Event()
        self.script: Callable[[list[int], SamplingParams, int], str | list[int]] = lambda ids, params, index: "Hello, world!"
        self.delay = 0.0
        self.hold: asyncio.Event | None = None
        """While set and not fired, nothing is generated (before the first token)."""
        self.fail_with: Exception | None = None
        self.fail_after: int | None = None
        """Tokens after which the request ends with finish_reason error."""
        self.error_text = "all tokens are masked"
        self.error_param: str | None = None
        self.requests: list[tuple[list[int], SamplingParams, dict[str, Any]]] = []
        self.aborted: list[str] = []
        self.active: set[str] = set()
        self.figures = EngineStats()
        self.cached_tokens = 0
        self.closed = False

    def stats(self) -> EngineStats:
        self.figures.running = len(self.active)
        return self.figures

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.active.discard(request_id)

    async def embed(self, prompt_token_ids: list[int]) -> np.ndarray:
        await asyncio.sleep(self.delay)
        return np.arange(1, 9, dtype=np.float32) * len(prompt_token_ids)

    async def drain(self, timeout: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        while self.active and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.closed = True

    async def generate(self, prompt_token_ids: list[int], params: SamplingParams, request_id: str, *,
                       prompt: str | None = None, priority: int = 0,
                       cache_salt: str | None = None) -> AsyncIterator[RequestOutput]:
        if self.fail_with is not None:
            raise self.fail_with
        self.requests.append((prompt_token_ids, params, {"priority": priority, "cache_salt": cache_salt}))
        self.active.add(request_id)
        try:
            if self.hold is not None:
                await self.hold.wait()
            async for output in self._tokens(prompt_token_ids, params, request_id, prompt):
                yield output
        finally:
            self.active.discard(request_id)

    async def _tokens(self, prompt_token_ids: list[int], params: SamplingParams, request_id: str,
                      prompt: str | None) -> AsyncIterator[RequestOutput]:
        said = [self.script(prompt_token_ids, params, index) for index in range(params.n)]
        ids = [self.tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else list(text) for text in said]
        writers = [_Writer(self, params, tokens, index) for index, tokens in enumerate(ids)]
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(self.position(token, params.prompt_logprobs) for token in prompt_token_ids[1:])]
        first = True
        while any(not writer.finished for writer in writers):
            for writer in writers:
                if writer.finished:
                    continue
                await asyncio.sleep(self.delay)
                if self.dead.is_set():
                    raise EngineDead("the engine process ended")
                delta = writer.step()
                yield RequestOutput(
                    request_id=request_id, prompt_token_ids=prompt_token_ids, outputs=[delta], prompt=prompt,
                    finished=all(writer.finished for writer in writers), cached_tokens=self.cached_tokens,
                    prompt_logprobs=prompt_logprobs if first else None,
                    error=self.error_text if delta.finish_reason == "error" else None,
                    metrics=RequestMetrics(arrival=0.0), error_param=self.error_param)
                first = False

    def position(self, token: int, top: int) -> PositionLogprobs:
        """A made-up distribution: the token itself most probable, then its neighbours, the last one impossible."""
        best = [TokenLogprob(token, -0.25, 1)]
        best += [TokenLogprob((token + step) % 264, -1.0 - step if step < 5 else float("-inf"), step + 1)
                 for step in range(1, top)]
        return PositionLogprobs(TokenLogprob(token, -0.25, 1), best[:top])


class _Writer:
    """Gives one token a step, as text deltas; ends at a stop string, at max_tokens or at the end of the script."""

    def __init__(self, engine: StubEngine, params: SamplingParams, tokens: list[int], index: int):
        self._engine = engine
        self._params = params
        self._tokens = tokens
        self._index = index
        self._position = 0
        self._held = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.finished = False

    def step(self) -> CompletionOutput:
        finish: str | None = None
        stop: int | str | None = None
        token = self._tokens[self._position] if self._position < len(self._tokens) else EOS
        self._position += 1
        text = ""
        if token == EOS:
            finish = "stop"
        elif token in self._params.stop_token_ids:
            finish, stop = "stop", token
        else:
            text = self._decoder.decode(self._engine.tokenizer.token_bytes(token))
        if finish is None and self._position >= (self._params.max_tokens or 1 << 30):
            finish = "length"
        if self._engine.fail_after is not None and self._position > self._engine.fail_after:
            finish = "error"
        self._held += text + (self._decoder.decode(b"", True) if finish is not None else "")
        for string in self._params.stop:
            if string in self._held and finish != "error":
                finish, stop = "stop", string
                self._held = self._held[:self._held.index(string)]
        keep = 0 if finish is not None else max((len(string) - 1 for string in self._params.stop), default=0)
        cut = max(0, len(self._held) - keep)
        text, self._held = self._held[:cut], self._held[cut:]
        self.finished = finish is not None
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = [self._engine.position(token, self._params.logprobs)]
        return CompletionOutput(index=self._index, text=text, token_ids=[token], logprobs=logprobs, finish_reason=finish,
                                stop_reason=stop)
