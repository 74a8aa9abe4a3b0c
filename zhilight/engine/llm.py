"""The offline face: `LLM` runs the engine in the calling process, without sockets."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from zhilight.config.engine import EngineConfig, refuse_unknown_settings
from zhilight.config.sampling import MAX_LOGPROBS, SamplingParams
from zhilight.engine.collector import CollectedRequest, Collector
from zhilight.engine.defaults import default_sampling_params
from zhilight.engine.messages import Abort, EngineStats
from zhilight.engine.outputs import RequestOutput
from zhilight.engine.request import validate_prompt
from zhilight.engine.runner import Runner
from zhilight.engine.startup import start_engine, tokenizer_loader
from zhilight.engine.stats_log import StatsLog
from zhilight.errors import RequestError

Prompt: TypeAlias = str | dict[str, Any] | Sequence[int]
"""A text, {"prompt": text}, {"prompt_token_ids": ids} or the ids themselves."""
Message: TypeAlias = dict[str, Any]
_NO_TOKENIZER = "the engine runs without a tokenizer (skip_tokenizer_init)"


@dataclass(frozen=True)
class Beam:
    """One hypothesis of a beam search: what it adds to the prompt (no text without a tokenizer). finish_reason is "stop" or
    "length"."""

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    finish_reason: str


class LLM:
    """A model ready to generate.

    model: a folder, a GGUF file, a hub name, or "demo". Further arguments are the fields of EngineConfig.
    Raises ConfigError, CheckpointError, DeviceError or OutOfMemory when it cannot start.
    """

    def __init__(self, model: str, **config: Any):
        refuse_unknown_settings(config)
        engine_config = EngineConfig(model=model, **config)
        started = start_engine(engine_config, offline=True)
        self.config = started.config
        self.model_config = started.model_config
        self.max_model_len = started.max_model_len
        self._core = started.core
        self.tokenizer = None if engine_config.skip_tokenizer_init else load_tokenizer_of(engine_config)
        self._collector = Collector(self.tokenizer)
        self._count = 0
        self._stats_log = StatsLog(engine_config.stats_interval)

    # ---- generation -------------------------------------------------------------------------------------------

    def generate(self, prompts: Prompt | Sequence[Prompt],
                 sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete every prompt; the outputs come in the order of the prompts.

        prompts: one prompt or a list of them. sampling_params: one for all or one each; None takes the model's defaults.
        Raises RequestError before anything runs when one of them cannot be served.
        """
        prompts = self._as_list(prompts)
        params = self._params_each(sampling_params, len(prompts))
        requests: list[CollectedRequest] = []
        try:
            for prompt, own in zip(prompts, params, strict=True):
                requests.append(self._submit(prompt, own, streamed=False))
            return self._run(requests, use_tqdm)
        finally:
            self._abandon(requests)

    def chat(self, messages: Sequence[Message] | Sequence[Sequence[Message]],
             sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, use_tqdm: bool = True, *,
             chat_template: str | None = None, tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = True,
             continue_final_message: bool = False, **template_arguments: Any) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or several (a list of those), through the model's chat template.

        Without sampling_params an answer may take what is left of the context.
        """
        if self.tokenizer is None:
            raise RequestError(f"{_NO_TOKENIZER}: use generate with prompt_token_ids.", param="messages")
        conversations = [messages] if not messages or isinstance(messages[0], dict) else list(messages)
        prompts = []
        for conversation in conversations:
            text = self.tokenizer.apply_chat_template(
                list(conversation), tools=tools, chat_template=chat_template, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, **template_arguments)
            prompts.append({"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)})
        if sampling_params is None:
            sampling_params = replace(self.default_sampling_params(), max_tokens=None)
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt and yield what is new, piece by piece. Leaving the loop early ends the request."""
        request = self._submit(prompt, sampling_params or self.default_sampling_params(), streamed=True)

        def pieces() -> Iterator[RequestOutput]:
            try:
                while True:
                    if request.refused is not None:
                        raise request.refused
                    if request.has_news:
                        yield request.take()
                    elif request.finished:
                        return
                    else:
                        self._advance()
            finally:
                self._abandon([request])

        return pieces()

    def beam_search(self, prompts: Prompt | Sequence[Prompt], beam_width: int, max_tokens: int,
                    ignore_eos: bool = False) -> list[list[Beam]]:
        """The `beam_width` continuations of each prompt with the highest total log-probability found, best first.

        Every step asks for the 2 * beam_width most probable tokens of each beam; the prefix cache makes that cheap.
        """
        if not 1 <= beam_width <= MAX_LOGPROBS // 2:
            raise RequestError(f"beam_width is {beam_width}; it must be from 1 to {MAX_LOGPROBS // 2}.", param="beam_width")
        if max_tokens < 1:
            raise RequestError(f"max_tokens is {max_tokens}; it must be at least 1.", param="max_tokens")
        return [self._search(self._ids(prompt)[1], beam_width, max_tokens, ignore_eos) for prompt in self._as_list(prompts)]

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config recommends."""
        return default_sampling_params(self.model_config)

    @property
    def runner(self) -> Runner:
        """What runs the steps on the device, for benchmarks."""
        return self._core.runner

    def stats(self) -> EngineStats:
        """The engine's gauges and counters now."""
        return self._core.stats()

    def close(self) -> None:
        """Give the device's memory back. The LLM cannot be used afterwards."""
        self._core.close()

    # ---- details ----------------------------------------------------------------------------------------------

    def _submit(self, prompt: Prompt, params: SamplingParams, streamed: bool) -> CollectedRequest:
        text, ids = self._ids(prompt)
        if self.tokenizer is None:
            params = replace(params, detokenize=False) if params.detokenize else params
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise RequestError(f"{_NO_TOKENIZER}, so it cannot honour {name}: use token ids.", param=name)
        array = validate_prompt(ids, params, self.config, self.model_config)
        bad_words = self._collector.bad_word_ids(params)
        self._count += 1
        request = self._collector.open(f"llm-{self._count}", text, ids, params, streamed)
        for message in request.messages(array, 0, None, bad_words):
            self._core.add(message)
        return request

    def _run(self, requests: list[CollectedRequest], use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        with tqdm(total=len(requests), desc="requests", unit="req", disable=not use_tqdm) as bar:
            pending = {request for request in requests if not request.finished}
            while pending:
                for request in self._advance():
                    if request in pending and request.refused is not None:
                        raise request.refused
                    if request.finished and request in pending:
                        pending.remove(request)
                        bar.update()
        return [request.take() for request in requests]

    def _advance(self) -> list[CollectedRequest]:
        """One step of the engine; the requests that have news, among them those that the engine has refused."""
        if not self._core.has_work:
            self._core.wait_for_grammars()
        touched, stopped = self._collector.dispatch(self._core.step())
        self._stats_log.offer(self._core.stats(), time.monotonic())
        if stopped:
            self._core.abort(Abort(stopped))
        return touched

    def _abandon(self, requests: list[CollectedRequest]) -> None:
        """Make the engine forget what has not ended, and take in what is still in flight."""
        handles = [handle for request in requests for handle in self._collector.close(request)]
        if handles:
            self._core.abort(Abort(handles))
        while self._core.has_work and not self._collector.num_sequences:
            self._core.step()

    def _search(self, prompt: list[int], width: int, max_tokens: int, ignore_eos: bool) -> list[Beam]:
        eos = () if ignore_eos else self.model_config.eos_token_ids
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2 * width, ignore_eos=ignore_eos, detokenize=False)
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        complete: list[tuple[float, list[int], str]] = []
        for _ in range(max_tokens):
            outputs = self.generate([{"prompt_token_ids": prompt + tokens} for _, tokens in beams], params, use_tqdm=False)
            candidates = []
            for (score, tokens), output in zip(beams, outputs, strict=True):
                top = output.outputs[0].logprobs[0].top
                candidates += [(score + entry.logprob, [*tokens, entry.token_id]) for entry in top]
            candidates.sort(key=lambda candidate: -candidate[0])
            beams = []
            for score, tokens in candidates[: 2 * width]:
                if tokens[-1] in eos:
                    complete.append((score, tokens, "stop"))
                elif len(beams) < width:
                    beams.append((score, tokens))
            complete = sorted(complete, key=lambda entry: -entry[0])[:width]
            if not beams or (len(complete) == width and complete[-1][0] >= beams[0][0]):
                break  # log-probabilities only fall: no open beam can overtake the complete ones
        complete += [(score, tokens, "length") for score, tokens in beams]
        best = sorted(complete, key=lambda entry: -entry[0])[:width]
        return [Beam(tokens, self.tokenizer.decode(tokens) if self.tokenizer is not None else "", score, reason)
                for score, tokens, reason in best]

    def _params_each(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise RequestError(f"{count} prompts but {len(params)} sampling_params: give one for all, or one for each.",
                               param="sampling_params")
        return list(params)

    def _ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        is_text = isinstance(prompt, str) or (isinstance(prompt, dict) and "prompt_token_ids" not in prompt)
        if self.tokenizer is None and is_text:
            raise RequestError(f"{_NO_TOKENIZER}: give prompt_token_ids.", param="prompt")
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, dict):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if ids is None and isinstance(text, str):
                return text, self.tokenizer.encode(text)
            if ids is None:
                raise RequestError('a prompt given as a dict needs "prompt" or "prompt_token_ids".', param="prompt")
            return text, list(ids)
        return None, list(prompt)

    @staticmethod
    def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        if isinstance(prompts, (str, dict)) or (len(prompts) and not isinstance(prompts[0], (str, dict, list, tuple))):
            return [prompts]
        return list(prompts)


def load_tokenizer_of(config: EngineConfig) -> Any:
    """The tokenizer that belongs to a configuration. Raises ConfigError when there is none."""
    from zhilight.weights.source import resolve_model

    return tokenizer_loader(config, resolve_model(config.model, config.revision))()
