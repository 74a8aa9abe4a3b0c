"""How the tokens of one request are chosen and when it stops."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zhilight.errors import RequestError

MAX_LOGPROBS = 20
"""Upper limit of `logprobs` and `prompt_logprobs`, the OpenAI API's own."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of one request. Names and meanings are those of the OpenAI API and of vLLM.

    Attributes:
        n: choices to return.
        best_of: choices to generate, of which the n with the highest mean log-probability are returned; None means n.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most probable tokens; 0 and -1 keep all.
        top_p: keep the smallest set whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less probable than min_p times the most probable one, in [0, 1].
        repetition_penalty: over prompt and output: a positive logit is divided, a negative one multiplied; 1 is off.
        presence_penalty, frequency_penalty: over the output: subtracted once a distinct token, or once an occurrence.
        logit_bias: token id -> value added to its logit.
        seed: makes the choice reproducible, whatever else runs in the batch; None takes fresh entropy.
        max_tokens: tokens to generate at most; None means what is left of the context.
        min_tokens: no end-of-sequence or stop token before that many.
        stop: strings that end the text; the match is not part of it unless include_stop_str_in_output.
        stop_token_ids: tokens that end the text, besides the model's end-of-sequence tokens.
        ignore_eos: go on after the model's end-of-sequence token.
        logprobs: log-probabilities of that many most probable tokens beside the sampled one's; None is off.
        prompt_logprobs: the same for every prompt token but the first.
        bad_words: strings that are never completed in the output.
        allowed_token_ids: when given, nothing else is sampled.
        skip_special_tokens, spaces_between_special_tokens, detokenize: how ids become text.
        structured: a grammar the output must follow, or None.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    structured: StructuredOutput | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        if self.temperature != 0 and self.temperature < 1e-5:
            _require(self.temperature > 0, "temperature", self.temperature, "a finite number >= 0")
            object.__setattr__(self, "temperature", 0.0)  # a float that small overflows the division: greedy is meant
        self._validate()

    def _validate(self) -> None:
        _require(_is_int(self.n) and 1 <= self.n <= 128, "n", self.n, "an integer from 1 to 128")
        if self.best_of is not None:
            _require(_is_int(self.best_of) and self.n <= self.best_of <= 128, "best_of", self.best_of,
                     f"an integer from n ({self.n}) to 128")
        _require(_finite(self.temperature) and 0 <= self.temperature <= 100, "temperature", self.temperature,
                 "a number from 0 to 100")
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "-1, 0 (both: all) or a positive integer")
        _require(_finite(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _require(_finite(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")
        _require(_finite(self.repetition_penalty) and 0 < self.repetition_penalty <= 100, "repetition_penalty",
                 self.repetition_penalty, "a number in (0, 100]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_finite(value) and -2 <= value <= 2, name, value, "a number from -2 to 2")
        if self.logit_bias is not None:
            for token, bias in self.logit_bias.items():
                _require(_is_int(token) and token >= 0, "logit_bias", token, "token ids >= 0 as keys")
                _require(_finite(bias) and -100 <= bias <= 100, "logit_bias", bias, "values from -100 to 100")
        if self.seed is not None:
            _require(_is_int(self.seed) and -(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")
        if self.max_tokens is not None:
            _require(_is_int(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer >= 1")
        _require(_is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", self.min_tokens, "an integer >= 0")
        if self.max_tokens is not None:
            _require(self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens,
                     f"at most max_tokens ({self.max_tokens})")
        _require(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "non-empty strings")
        _require(all(isinstance(s, str) and s for s in self.bad_words), "bad_words", self.bad_words, "non-empty strings")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _require(_is_int(value) and 0 <= value <= MAX_LOGPROBS, name, value, f"an integer from 0 to {MAX_LOGPROBS}")
        if self.allowed_token_ids is not None:
            _require(len(self.allowed_token_ids) > 0, "allowed_token_ids", self.allowed_token_ids, "at least one token id")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken each time."""
        return self.temperature == 0

    @property
    def num_sequences(self) -> int:
        """Sequences the engine generates for the request: best_of when given, else n."""
        return self.best_of or self.n

    def for_choice(self, index: int) -> SamplingParams:
        """The settings of choice `index`: one sequence, with a sub-seed of its own when the request is seeded."""
        seed = self.seed if self.seed is None or index == 0 else _sub_seed(self.seed, index)
        if self.n == 1 and self.best_of is None and seed == self.seed:
            return self
        return replace(self, n=1, best_of=None, seed=seed)


@dataclass(frozen=True)
class StructuredOutput:
    """A grammar the output must follow. `kind` is json_schema, json_object, regex, choice or grammar.

    `value` is the JSON schema as text, "" for json_object, the regular expression, a JSON list of the choices, or the
    grammar (Lark or GBNF) as text.
    """

    kind: str
    value: str


def _sub_seed(seed: int, index: int) -> int:
    """SplitMix64 of (seed, index): well mixed, the same on every platform, in the range of a 64-bit integer."""
    z = (seed + index * 0x9E3779B97F4A7C15) & (2**64 - 1)
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (z ^ (z >> 31)) >> 1


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise RequestError(f"{name} is {value!r}; it must be {expected}.", param=name)
