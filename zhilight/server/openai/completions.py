"""POST /v1/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from msgspec import UNSET

from zhilight.config.sampling import SamplingParams
from zhilight.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from zhilight.server.openai.body import read_body
from zhilight.server.openai.errors import bad_request
from zhilight.server.openai.generation import Generation, is_long, new_request_id, stream_answer
from zhilight.server.openai.logprobs import CompletionLogprobsBuilder, TokenNames, prompt_logprobs
from zhilight.server.openai.prompts import PreparedPrompt, text_prompts, truncate
from zhilight.server.openai.protocol import CompletionRequest, refuse_unsupported
from zhilight.server.openai.responses import Completion, CompletionChoice
from zhilight.server.openai.sampling import check_common, check_count, make_sampling_params, output_budget
from zhilight.server.openai.serving import REQUEST_ID, SERVING, Serving
from zhilight.server.openai.streaming import EventStream, json_response
from zhilight.server.openai.structured import structured_output_of
from zhilight.server.openai.usage import UsageCount

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True)
class Job:
    """A completion request, ready to run: one SamplingParams a prompt, because what is left of the context differs."""

    prompts: list[PreparedPrompt]
    params: list[SamplingParams]
    discard_output: bool
    """max_tokens 0: the prompt is scored, and the one token that the engine must generate is dropped."""


async def completions(request: web.Request) -> web.StreamResponse:
    serving = request.app[SERVING]
    body = await read_body(request, CompletionRequest)
    model = serving.model_name(body.model)
    job = await serving.in_pool(prepare, serving, body)
    answer = CompletionAnswer(serving, body, model, job, new_request_id("cmpl", body.request_id or request[REQUEST_ID]))
    serving.log_request(answer.id, job.prompts, job.params[0])
    async with Generation(serving, job.prompts, job.params, priority=body.priority or 0,
                          cache_salt=body.cache_salt) as generation:
        if body.stream:
            return await stream_answer(request, answer, generation)
        outputs = [item async for item in generation.outputs()]
        return await serving.in_pool_if(is_long([output for _, output in outputs]), answer.whole, outputs)


def prepare(serving: Serving, body: CompletionRequest) -> Job:
    """Validate and tokenize; runs in the thread pool. Raises RequestError or APIError."""
    refuse_unsupported(body)
    check_common(body)
    prompts = text_prompts(serving, body.prompt, param="prompt",
                           add_special_tokens=True if body.add_special_tokens is None else body.add_special_tokens)
    check_count(serving, body, len(prompts))
    scored = bool(body.echo or body.prompt_logprobs is not None)
    discard = body.max_tokens == 0 and scored
    if body.max_tokens is not None and body.max_tokens < 1 and not discard:
        raise bad_request(f"max_tokens is {body.max_tokens}; it must be at least 1 (0 only together with echo).", "max_tokens")
    structured = structured_output_of(body)
    if structured is not None:
        serving.check_grammar(structured.constraint, structured.param)
    reserve = 1 if discard else min(body.max_tokens or DEFAULT_MAX_TOKENS, serving.max_model_len - 1)
    prompts = [truncate(serving, prompt, body.truncate_prompt_tokens, reserve=reserve) for prompt in prompts]
    if body.echo:
        prompts = [replace(prompt, text=serving.tokenizer.decode(prompt.token_ids, skip_special_tokens=_skips(body)))
                   if prompt.text is None else prompt for prompt in prompts]
    params = []
    for prompt in prompts:
        budget = output_budget(serving, prompt_tokens=len(prompt.token_ids), asked=1 if discard else body.max_tokens,
                               default=DEFAULT_MAX_TOKENS, param="max_tokens")
        settings = make_sampling_params(serving, body, max_tokens=budget, logprobs=body.logprobs,
                                        structured=structured and structured.constraint)
        if body.echo and body.logprobs is not None and settings.prompt_logprobs is None:
            settings = replace(settings, prompt_logprobs=body.logprobs)
        params.append(settings)
    return Job(prompts, params, discard)


def _skips(body: CompletionRequest) -> bool:
    return True if body.skip_special_tokens is None else body.skip_special_tokens


class CompletionAnswer:
    """Turns the engine's outputs into one answer or into the chunks of a stream."""

    def __init__(self, serving: Serving, body: CompletionRequest, model: str, job: Job, answer_id: str):
        self.id = answer_id
        self._body = body
        self._model = model
        self._job = job
        self._created = int(time.time())
        self._names = TokenNames(serving.tokenizer, bool(
            serving.config.return_tokens_as_token_ids if body.return_tokens_as_token_ids is None
            else body.return_tokens_as_token_ids))
        self._usage = UsageCount(sum(len(prompt.token_ids) for prompt in job.prompts))
        self._n = body.n or 1
        self._choices = [_Choice(prompt, self._names, body) for prompt in job.prompts for _ in range(self._n)]
        self._prompt_logprobs: dict[int, list[PositionLogprobs | None]] = {}
        """By prompt: they come once, and each of its choices shows them."""
        self._opened = 0
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.include_usage and options.continuous_usage_stats)

    def _add(self, prompt_index: int, output: RequestOutput) -> None:
        self._usage.add_prompt(prompt_index, output)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        for delta in output.outputs:
            choice = self._choices[prompt_index * self._n + delta.index]
            choice.open(self._prompt_logprobs.get(prompt_index))
            self._usage.add_generated(0 if self._job.discard_output else len(delta.token_ids))
            choice.add(delta, discard=self._job.discard_output)

    def whole(self, outputs: list[tuple[int, RequestOutput]]) -> web.Response:
        """The answer that is not streamed."""
        for item in outputs:
            self._add(*item)
        choices = [choice.take(index) for index, choice in enumerate(self._choices)]
        return json_response(self._completion(choices, self._usage.usage()))

    def events(self, stream: EventStream, prompt_index: int, output: RequestOutput) -> bytes:
        return b"".join(map(stream.encode, self.chunks(prompt_index, output)))

    def chunks(self, prompt_index: int, output: RequestOutput) -> list[Completion]:
        """One chunk for each choice that has something new; choices appear first in the order of their indexes."""
        self._add(prompt_index, output)
        touched = [prompt_index * self._n + delta.index for delta in output.outputs]
        chunks = []
        if touched and max(touched) >= self._opened:
            for index in range(self._opened, max(touched)):
                if index not in touched:
                    chunks.append(self._chunk(CompletionChoice(index=index, text="")))
            self._opened = max(touched) + 1
        for index in sorted(touched):
            taken = self._choices[index].take(index)
            if taken.text or taken.finish_reason or taken.logprobs or taken.token_ids:
                chunks.append(self._chunk(taken))
        return sorted(chunks, key=lambda chunk: chunk.choices[0].index)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        usage: Any = UNSET
        if self.include_usage:
            usage = self._usage.usage() if self._continuous else None
        return self._completion([choice], usage)

    def usage_chunk(self) -> Completion:
        return self._completion([], self._usage.usage())

    def _completion(self, choices: list[CompletionChoice], usage: Any) -> Completion:
        return Completion(id=self.id, created=self._created, model=self._model, choices=choices, usage=usage,
                          service_tier="default" if self._body.service_tier else UNSET)


class _Choice:
    """What is new of one choice; `take` empties it."""

    def __init__(self, prompt: PreparedPrompt, names: TokenNames, body: CompletionRequest):
        self._prompt = prompt
        self._names = names
        self._body = body
        self._logprobs = None if body.logprobs is None else CompletionLogprobsBuilder(
            names, body.logprobs, _skips(body))
        self._opened = False
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._prompt_logprobs: Any = UNSET
        self._prompt_token_ids: Any = UNSET
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def open(self, positions: list[PositionLogprobs | None] | None) -> None:
        """Before the first delta: what is known of the prompt."""
        if self._opened:
            return
        self._opened = True
        if self._body.return_token_ids:
            self._prompt_token_ids = self._prompt.token_ids
        if self._body.prompt_logprobs is not None and positions is not None:
            self._prompt_logprobs = prompt_logprobs(self._names, positions, self._body.prompt_logprobs)
        if self._body.echo:
            self._text.append(self._prompt.text or "")
            if self._logprobs is not None and positions is not None:
                self._logprobs.add_prompt(self._prompt.token_ids, positions)

    def add(self, delta: CompletionOutput, *, discard: bool) -> None:
        if not discard:
            self._text.append(delta.text)
            if self._body.return_token_ids:
                self._token_ids += delta.token_ids
            if self._logprobs is not None and delta.logprobs:
                self._logprobs.add(delta.logprobs)
        if delta.finish_reason is not None:
            self._finish_reason = "length" if discard else delta.finish_reason
            self._stop_reason = None if discard else delta.stop_reason

    def take(self, index: int) -> CompletionChoice:
        logprobs = None
        if self._logprobs is not None:
            taken = self._logprobs.take()
            logprobs = taken if taken.tokens else None
        choice = CompletionChoice(
            index=index, text="".join(self._text), logprobs=logprobs, finish_reason=self._finish_reason,
            stop_reason=self._stop_reason, prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=self._prompt_token_ids,
            token_ids=self._token_ids if self._body.return_token_ids else UNSET)
        self._text, self._token_ids = [], []
        self._prompt_logprobs = self._prompt_token_ids = UNSET
        return choice
