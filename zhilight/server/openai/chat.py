"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from aiohttp import web
from msgspec import UNSET

from zhilight.config.sampling import SamplingParams
from zhilight.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from zhilight.server.openai.body import read_body
from zhilight.server.openai.chat_message import MessagePiece, MessageReader, MessageStyle, message_style
from zhilight.server.openai.errors import bad_request
from zhilight.server.openai.generation import Generation, is_long, new_request_id, stream_answer
from zhilight.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from zhilight.server.openai.prompts import PreparedPrompt, chat_prompt, message_text, truncate
from zhilight.server.openai.protocol import ChatCompletionRequest, refuse_unsupported
from zhilight.server.openai.responses import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatMessage,
    ChoiceLogprobs,
    FunctionDelta,
    ToolCallDelta,
)
from zhilight.server.openai.sampling import check_common, check_count, make_sampling_params, output_budget
from zhilight.server.openai.serving import REQUEST_ID, SERVING, Serving
from zhilight.server.openai.streaming import EventStream, json_response
from zhilight.server.openai.structured import structured_output_of
from zhilight.server.openai.usage import UsageCount


@dataclass(frozen=True)
class Job:
    """A chat request, ready to run. `prompt_tail` is the end of the rendered prompt, `echo` text put before the answer."""

    prompt: PreparedPrompt
    params: SamplingParams
    style: MessageStyle
    prompt_tail: str
    echo: str


async def chat_completions(request: web.Request) -> web.StreamResponse:
    serving = request.app[SERVING]
    body = await read_body(request, ChatCompletionRequest)
    model = serving.model_name(body.model)
    job = await serving.in_pool(prepare, serving, body)
    answer = ChatAnswer(serving, body, model, job, new_request_id("chatcmpl", body.request_id or request[REQUEST_ID]))
    serving.log_request(answer.id, [job.prompt], job.params)
    async with Generation(serving, [job.prompt], [job.params], priority=body.priority or 0,
                          cache_salt=body.cache_salt) as generation:
        if body.stream:
            return await stream_answer(request, answer, generation)
        outputs = [output async for _, output in generation.outputs()]
        return await serving.in_pool_if(is_long(outputs), answer.whole, outputs)


def prepare(serving: Serving, body: ChatCompletionRequest) -> Job:
    """Validate, render and tokenize; runs in the thread pool. Raises RequestError or APIError."""
    refuse_unsupported(body)
    check_common(body)
    check_count(serving, body, 1)
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise bad_request("top_logprobs needs logprobs to be true.", "top_logprobs")
        if not 0 <= body.top_logprobs <= 20:
            raise bad_request(f"top_logprobs is {body.top_logprobs}; it must be from 0 to 20.", "top_logprobs")
    asked, param = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, param = body.max_tokens, "max_tokens"
    if asked is not None and asked < 1:
        raise bad_request(f"{param} is {asked}; it must be at least 1.", param)
    structured = structured_output_of(body)
    if structured is not None:
        serving.check_grammar(structured.constraint, structured.param)
    style = message_style(serving, body, structured and structured.constraint)
    prompt = chat_prompt(serving, body, tools=style.template_tools)
    prompt = truncate(serving, prompt, body.truncate_prompt_tokens,
                      reserve=min(asked or 1, serving.max_model_len - 1))
    budget = output_budget(serving, prompt_tokens=len(prompt.token_ids), asked=asked, param=param,
                           default=serving.default("max_new_tokens", None))
    tail = prompt.text if prompt.text is not None else serving.tokenizer.decode(prompt.token_ids[-64:], False)
    constraint = style.constraint
    if constraint is not None:
        constraint = style.after_thought(constraint, tail, serving.tokenizer)
        serving.check_grammar(constraint, "tools")
    params = make_sampling_params(serving, body, max_tokens=budget, structured=constraint,
                                  logprobs=(body.top_logprobs or 0) if body.logprobs else None)
    if style.needs_special_tokens:
        params = replace(params, skip_special_tokens=False)
    return Job(prompt, params, style, tail[-256:], _echo(serving, body))


def _echo(serving: Serving, body: ChatCompletionRequest) -> str:
    """vLLM's echo: the last message's text, when it has the role of the answer."""
    if not body.echo or body.messages[-1].role != serving.config.response_role:
        return ""
    return message_text(body.messages[-1], len(body.messages) - 1) or ""


class ChatAnswer:
    """Turns the engine's outputs into one answer or into the chunks of a stream."""

    def __init__(self, serving: Serving, body: ChatCompletionRequest, model: str, job: Job, answer_id: str):
        self.id = answer_id
        self._body = body
        self._model = model
        self._job = job
        self._role = serving.config.response_role
        self._created = int(time.time())
        as_ids = serving.config.return_tokens_as_token_ids
        self._names = TokenNames(serving.tokenizer, as_ids if body.return_tokens_as_token_ids is None
                                 else body.return_tokens_as_token_ids)
        self._usage = UsageCount(len(job.prompt.token_ids))
        self._choices = [_Choice(MessageReader(job.style, job.prompt_tail)) for _ in range(body.n or 1)]
        self._prompt_logprobs: Any = UNSET
        self._opened = False
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self._continuous = bool(options and options.include_usage and options.continuous_usage_stats)

    def _add(self, output: RequestOutput) -> None:
        self._count(output)
        if output.prompt_logprobs is not None and self._body.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(self._names, output.prompt_logprobs, self._body.prompt_logprobs)
        for delta in output.outputs:
            choice = self._choices[delta.index]
            choice.add(delta)
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs or ()

    def _count(self, output: RequestOutput) -> None:
        self._usage.add_prompt(0, output)
        self._usage.add_generated(sum(len(delta.token_ids) for delta in output.outputs))

    def whole(self, outputs: list[RequestOutput]) -> web.Response:
        """The answer that is not streamed."""
        for output in outputs:
            self._add(output)
        return json_response(ChatCompletion(
            id=self.id, created=self._created, model=self._model, usage=self._usage.usage(),
            choices=[self._whole_choice(index, choice) for index, choice in enumerate(self._choices)],
            service_tier="default" if self._body.service_tier else None, prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=self._job.prompt.token_ids if self._body.return_token_ids else UNSET))

    def _whole_choice(self, index: int, choice: _Choice) -> ChatChoice:
        message = ChatMessage(role=self._role, content=self._job.echo + choice.content)
        if self._job.style.shows_reasoning:
            message.reasoning_content = message.reasoning = choice.reasoning or None
        if choice.calls:
            message.tool_calls = [CalledTool(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
                                  for call in choice.calls]
        if not message.content and (choice.calls or choice.reasoning):
            message.content = None
        return ChatChoice(
            index=index, message=message, finish_reason=choice.finish_reason(self._job.style),
            stop_reason=choice.stop_reason, logprobs=self._logprobs(choice.logprobs),
            token_ids=choice.token_ids if self._body.return_token_ids else UNSET)

    def _logprobs(self, positions: list[PositionLogprobs]) -> ChoiceLogprobs | None:
        if not self._body.logprobs:
            return None
        return ChoiceLogprobs(content=chat_logprobs(self._names, positions, self._body.top_logprobs or 0))

    def events(self, stream: EventStream, prompt_index: int, output: RequestOutput) -> bytes:
        """The encoded chunks of one engine output, behind those that open the stream."""
        opening = [] if self._opened else self._role_chunks(output)
        self._opened = True
        return b"".join(map(stream.encode, opening + self.chunks(output)))

    def _role_chunks(self, first: RequestOutput) -> list[ChatCompletionChunk]:
        """The first chunk of every choice, in order: its role and no text."""
        self._usage.add_prompt(0, first)
        chunks = []
        for index in range(len(self._choices)):
            chunks.append(self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(role=self._role, content=""))))
            if self._job.echo:
                chunks.append(self._chunk(ChatChunkChoice(index=index, delta=ChatDelta(content=self._job.echo))))
        if self._body.return_token_ids:
            chunks[0].prompt_token_ids = self._job.prompt.token_ids
        return chunks

    def chunks(self, output: RequestOutput) -> list[ChatCompletionChunk]:
        """The chunks of one engine output. Log-probabilities and ids ride on the first one of a choice."""
        self._count(output)
        chunks: list[ChatCompletionChunk] = []
        for delta in output.outputs:
            choice = self._choices[delta.index]
            deltas = [_chat_delta(piece) for piece in choice.add(delta)]
            if not deltas and (delta.finish_reason or delta.logprobs or (self._body.return_token_ids and delta.token_ids)):
                deltas = [ChatDelta()]
            made = [ChatChunkChoice(index=delta.index, delta=part) for part in deltas]
            if made and self._body.logprobs and delta.logprobs:
                made[0].logprobs = self._logprobs(delta.logprobs)
            if made and self._body.return_token_ids:
                made[0].token_ids = delta.token_ids
            if delta.finish_reason:
                made[-1].finish_reason = choice.finish_reason(self._job.style)
                made[-1].stop_reason = choice.stop_reason
            chunks += map(self._chunk, made)
        return chunks

    def _chunk(self, choice: ChatChunkChoice) -> ChatCompletionChunk:
        usage: Any = UNSET
        if self.include_usage:
            usage = self._usage.usage() if self._continuous else None
        return ChatCompletionChunk(id=self.id, created=self._created, model=self._model, choices=[choice], usage=usage,
                                   service_tier="default" if self._body.service_tier else UNSET)

    def usage_chunk(self) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self.id, created=self._created, model=self._model, choices=[],
                                   usage=self._usage.usage())


def _chat_delta(piece: MessagePiece) -> ChatDelta:
    delta = ChatDelta()
    if piece.reasoning:
        delta.reasoning_content = delta.reasoning = piece.reasoning
    if piece.content:
        delta.content = piece.content
    if piece.calls:
        delta.tool_calls = [ToolCallDelta(
            index=call.index, id=call.id or UNSET, type="function" if call.id else UNSET,
            function=FunctionDelta(name=call.name or UNSET, arguments=call.arguments)) for call in piece.calls]
    return delta


@dataclass
class _Call:
    id: str
    name: str
    arguments: str = ""


class _Choice:
    """What one choice has said so far."""

    def __init__(self, reader: MessageReader):
        self._reader = reader
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self.calls: list[_Call] = []
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.stop_reason: int | str | None = None
        self._finish_reason: str | None = None

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def add(self, delta: CompletionOutput) -> list[MessagePiece]:
        """Read a delta; the pieces of message that it completed."""
        pieces = self._reader.read(delta.text, last=delta.finish_reason is not None)
        for piece in pieces:
            self._content.append(piece.content)
            self._reasoning.append(piece.reasoning)
            for call in piece.calls:
                if call.index == len(self.calls):
                    self.calls.append(_Call(call.id or "", call.name or ""))
                self.calls[call.index].arguments += call.arguments
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
        return pieces

    def finish_reason(self, style: MessageStyle) -> str | None:
        """tool_calls when the model chose to call; a call that was forced by name ends with stop, as OpenAI's does."""
        if self.calls and self._finish_reason == "stop" and not style.named_tool:
            return "tool_calls"
        return self._finish_reason
