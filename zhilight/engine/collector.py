"""From tokens of sequences to outputs of requests: fan-out of n, detokenization, stop strings, best_of.

Both faces of the engine use it: the offline one beside the engine, the async one in the API process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from zhilight.config.sampling import SamplingParams
from zhilight.engine.messages import Add, Finished, StepOutput
from zhilight.engine.outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from zhilight.errors import RequestError
from zhilight.tokenization.detokenizer import Detokenizer
from zhilight.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Choice:
    """One sequence of a request, and what of it has not been handed out yet."""

    def __init__(self, request: CollectedRequest, index: int, handle: int, params: SamplingParams, detokenizer: Detokenizer):
        self.request = request
        self.index = index
        self.handle = handle
        self.params = params
        self.started = False
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0
        self.cumulative_logprob = 0.0
        self._detokenizer = detokenizer
        self.arrived: list[int] = []
        """Tokens that `settle` has not taken in yet, and their log-probabilities."""
        self.arrived_logprobs: list[PositionLogprobs] = []
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._ended_unseen = False

    def settle(self, finished: Finished | None = None) -> bool:
        """Turn what has arrived into text. True when a stop string ended the choice, so that the engine must be told."""
        if self.finish_reason is not None:
            return False
        by_token = finished is not None and finished.stop_token
        delta = self._detokenizer.push(self.arrived, finished=finished is not None, stopped_by_token=by_token)
        used = delta.num_tokens
        self._text += delta.text
        self._token_ids += self.arrived[:used]
        self.num_tokens += used
        if self.arrived_logprobs:
            entries = self.arrived_logprobs[:used]
            self._logprobs += entries
            self.cumulative_logprob += sum(entry.chosen.logprob for entry in entries)
            self.arrived_logprobs = []
        self.arrived = []
        if delta.stop is not None:
            self._end("stop", delta.stop)
            return finished is None
        if finished is not None:
            self._end(finished.reason, finished.stop_reason)
        return False

    def fail(self) -> None:
        """End it with an error on this side."""
        if self.finish_reason is None:
            self._end("error", None)

    def cancel(self) -> None:
        """End it as aborted, with the text held back so far."""
        if self.finish_reason is None:
            self.settle(Finished(self.handle, "abort"))

    @property
    def has_news(self) -> bool:
        return bool(self._token_ids or self._text or self._ended_unseen)

    def take(self) -> CompletionOutput:
        """What is new since the last time."""
        shown = self.request.params.logprobs is not None
        output = CompletionOutput(
            index=self.index, text=self._text, token_ids=self._token_ids, logprobs=self._logprobs if shown else None,
            finish_reason=self.finish_reason, stop_reason=self.stop_reason,
            cumulative_logprob=self.cumulative_logprob if shown else None)
        self._text, self._token_ids, self._logprobs, self._ended_unseen = "", [], [], False
        return output

    def _end(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._ended_unseen = True


class CollectedRequest:
    """One request: its choices, and what a consumer has not seen of them."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams,
                 tokenizer: Tokenizer, handles: Iterator[int], streamed: bool):
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.metrics = RequestMetrics(arrival=time.monotonic())
        self.cached_tokens = 0
        self.error: str | None = None
        self.error_param: str | None = None
        self.refused: RequestError | None = None
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
        self.settles_each_step = streamed or bool(params.stop)
        """Whether its text is made as it comes; otherwise at the end, which is cheaper."""
        self._prompt_logprobs_sent = params.prompt_logprobs is None
        self._selects = params.num_sequences > params.n
        self._done = False
        self.choices = []
        for index in range(params.num_sequences):
            own = params.for_choice(index)
            self.choices.append(Choice(self, index, next(handles), own, Detokenizer(tokenizer, prompt_token_ids, own)))

    def messages(self, prompt: np.ndarray, priority: int, cache_salt: str | None, bad_words: list[list[int]]) -> list[Add]:
        """The sequences to send to the engine; prompt [n] int32. Only the first one computes prompt log-probabilities."""
        result = []
        for choice in self.choices:
            params = choice.params
            changes: dict[str, Any] = {}
            if self._selects and params.logprobs is None:
                changes["logprobs"] = 0  # the choice among best_of is made by them
            if choice.index and params.prompt_logprobs is not None:
                changes["prompt_logprobs"] = None
            result.append(Add(choice.handle, prompt.tobytes(), replace(params, **changes) if changes else params,
                              self.metrics.arrival, priority, cache_salt, bad_words))
        return result

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    @property
    def has_news(self) -> bool:
        if self._done:
            return False
        if self._selects:
            return self.finished
        return not self._awaits_prompt_logprobs and any(choice.has_news for choice in self.choices)

    @property
    def _awaits_prompt_logprobs(self) -> bool:
        """They go out with the first output, all of them; the other choices may well be faster than the one that has them."""
        return (self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids)
                and self.choices[0].finish_reason is None)

    def take(self) -> RequestOutput:
        """What is new since the last time; the last one has `finished` set."""
        finished = self.finished
        if self._selects:
            outputs = self._best()
        else:
            outputs = [choice.take() for choice in self.choices if choice.has_news]
        self._done = finished
        prompt_logprobs = None
        if not self._prompt_logprobs_sent:
            prompt_logprobs, self._prompt_logprobs_sent = self.prompt_logprobs, True
        return RequestOutput(self.request_id, self.prompt_token_ids, outputs, finished, self.prompt, prompt_logprobs,
                             self.cached_tokens, self.error, self.metrics, self.error_param)

    def cancel(self) -> list[int]:
        """End what still runs as aborted; the handles that the engine must forget."""
        running = [choice for choice in self.choices if choice.finish_reason is None]
        for choice in running:
            choice.cancel()
        self.metrics.finished = self.metrics.finished or time.monotonic()
        return [choice.handle for choice in running]

    def _best(self) -> list[CompletionOutput]:
        """The n choices of highest mean log-probability, best first."""
        ranked = sorted(self.choices, key=lambda choice: -choice.cumulative_logprob / max(choice.num_tokens, 1))
        outputs = [choice.take() for choice in ranked[: self.params.n]]
        for index, output in enumerate(outputs):
            output.index = index
        return outputs


class Collector:
    """All requests of one front, by the handles of their sequences."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._handles = count(1)
        self._choices: dict[int, Choice] = {}
        self.num_waiting = 0
        """Sequences that the engine has not started yet."""

    @property
    def num_sequences(self) -> int:
        """Sequences that have not ended."""
        return len(self._choices)

    def next_handle(self) -> int:
        return next(self._handles)

    def open(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams,
             streamed: bool = True) -> CollectedRequest:
        """A new request. `streamed`: its consumer looks at every piece, and not only at the end."""
        request = CollectedRequest(request_id, prompt, prompt_token_ids, params, self._tokenizer, self._handles, streamed)
        self._choices.update((choice.handle, choice) for choice in request.choices)
        self.num_waiting += len(request.choices)
        return request

    def bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """Token ids of the bad words, as they are written at the start of a text and after a space."""
        sequences = []
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = self._tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in sequences:
                    sequences.append(ids)
        return sequences

    def close(self, request: CollectedRequest) -> list[int]:
        """Forget a request; the handles that the engine must forget too."""
        handles = request.cancel()
        for choice in request.choices:
            self._drop(choice)
        return handles

    def dispatch(self, out: StepOutput) -> tuple[list[CollectedRequest], list[int]]:
        """(requests that have news, handles whose sequence a stop string ended). What belongs to nobody is dropped."""
        choices = self._choices
        for started in out.started:
            choice = choices.get(started.handle)
            if choice is not None and not choice.started:
                choice.started = True
                self.num_waiting -= 1
                metrics = choice.request.metrics
                metrics.first_scheduled = metrics.first_scheduled or started.time
                if choice.index == 0:
                    choice.request.cached_tokens = started.cached_tokens
        touched: dict[Choice, Finished | None] = {}
        for handle, token in zip(np.frombuffer(out.handles, np.int64).tolist(), np.frombuffer(out.tokens, np.int32).tolist(),
                                 strict=True):
            choice = choices.get(handle)
            if choice is not None:
                choice.arrived.append(token)
                touched[choice] = None
        for handle, entry in out.logprobs:
            if (choice := choices.get(handle)) is not None:
                choice.arrived_logprobs.append(entry)
        for handle, entries in out.prompt_logprobs:
            if (choice := choices.get(handle)) is not None and choice.request.prompt_logprobs is not None:
                choice.request.prompt_logprobs.extend(entries)
        for finished in out.finished:
            if (choice := choices.get(finished.handle)) is not None:
                touched[choice] = finished
        return self._settle(touched)

    def _settle(self, touched: dict[Choice, Finished | None]) -> tuple[list[CollectedRequest], list[int]]:
        requests: dict[CollectedRequest, None] = {}
        stopped = []
        now = time.monotonic()
        for choice, finished in touched.items():
            request, metrics = choice.request, choice.request.metrics
            if metrics.first_token is None and choice.arrived:
                metrics.first_token = now
            if finished is None and not request.settles_each_step:
                continue
            metrics.last_token = now if choice.arrived else metrics.last_token
            if finished is not None and finished.reason == "refused":
                request.refused = RequestError(finished.error or "refused", param=finished.param)
            if finished is not None and finished.error is not None:
                request.error, request.error_param = finished.error, finished.param
            try:
                if choice.settle(finished):
                    stopped.append(choice.handle)
            except Exception as error:  # one request's text must not end the others'
                logger.exception("The output of request %s cannot be made", request.request_id)
                request.error = f"{type(error).__name__}: {error}"
                choice.fail()
                stopped.append(choice.handle)
            if choice.finish_reason is not None:
                self._drop(choice)
                if request.finished:
                    metrics.finished = now
            requests[request] = None
        return list(requests), stopped

    def _drop(self, choice: Choice) -> None:
        if self._choices.pop(choice.handle, None) is not None and not choice.started:
            self.num_waiting -= 1
