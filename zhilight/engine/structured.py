"""Structured output: a grammar compiled once, and the tokens it allows at each step of one choice.

llguidance does the work (an Earley parser over a lexer of derivatives, a token trie walked with the mask's bits). A grammar
that cannot be honoured is refused when it is compiled, with the place and the keyword; nothing of a schema is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from zhilight.config.sampling import StructuredOutput
from zhilight.errors import RequestError

if TYPE_CHECKING:
    import llguidance

    from zhilight.tokenization.tokenizer import Tokenizer

PARAM = "response_format"
"""The field that errors name; a route whose request used another one replaces it."""
_SUBSCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SUBSCHEMA_MAPS = ("properties", "$defs", "definitions", "patternProperties")
_SUBSCHEMAS = ("items", "additionalProperties", "additionalItems")


class Grammar:
    """A compiled grammar, immutable: any number of `GrammarState`s start from it. Made by `compile_grammar`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int):
        self._matcher = matcher
        self.vocab_size = vocab_size

    def matcher(self) -> llguidance.LLMatcher:
        """A matcher of its own for one choice."""
        return self._matcher.deep_copy()


class GrammarState:
    """How far one choice has come in its grammar.

    The protocol: `mask` before a token is sampled, `advance` after; when `is_finished`, only end of sequence is left.
    """

    def __init__(self, grammar: Grammar):
        self._matcher = grammar.matcher()
        self._words = -(-grammar.vocab_size // 32)

    def mask(self, out: np.ndarray | None = None) -> np.ndarray:
        """Allowed tokens: uint32 [ceil(vocab / 32)], bit i % 32 of word i // 32 for token i; written to `out` if given.

        End-of-sequence tokens are allowed exactly where the output may end. Other threads run meanwhile.
        Raises RequestError when no token is allowed: the grammar cannot be fulfilled from here.
        """
        if out is None:
            out = np.empty(self._words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(out.ctypes.data, out.nbytes)
        if self._matcher.is_error():
            raise RequestError(f"the grammar allows no further token: {_first_line(self._matcher.get_error())}. Simplify it.",
                               param=PARAM)
        if not out.any():
            raise RequestError("the grammar allows no token of this model's vocabulary. Change it.", param=PARAM)
        return out

    def advance(self, token_id: int) -> None:
        """Takes the sampled token. Raises RequestError when the grammar does not allow it."""
        if not self._matcher.consume_token(token_id):
            raise RequestError(f"token {token_id} is not allowed by the grammar: {_first_line(self._matcher.get_error())}.",
                               param=PARAM)

    @property
    def is_finished(self) -> bool:
        """Nothing but end of sequence can follow (or it has come)."""
        return self._matcher.is_stopped()


def compile_grammar(structured: StructuredOutput, tokenizer: Tokenizer, *, vocab_size: int | None = None,
                    eos_token_ids: tuple[int, ...] | None = None) -> Grammar:
    """Compiles and checks `structured`.

    vocab_size: width of the model's logits, where it exceeds the tokenizer's; ids beyond the tokenizer are never allowed.
    eos_token_ids: what ends the output; default the tokenizer's own. Raises RequestError with the place and the keyword.
    """
    size = max(vocab_size or 0, tokenizer.vocab_size)
    eos = tuple(eos_token_ids or ()) or (() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
    if not eos:
        raise RequestError("structured output needs an end-of-sequence token, which this model's tokenizer does not name.",
                           param=PARAM)
    return _compile(structured, _token_trie(tokenizer, size, eos), size)


def check_grammar(structured: StructuredOutput) -> None:
    """The checks of `compile_grammar` that need no tokenizer. Raises RequestError with the place and the keyword."""
    _validate(structured, _source(structured), None)


def after_marker(structured: StructuredOutput, marker: str, opening: str | None = None,
                 tokenizer: Tokenizer | None = None) -> StructuredOutput:
    """The same structure for an answer that follows a thought, which is free text up to and with `marker`.

    opening: None when the thought is open already; otherwise what opens it, and then it is the model's choice to think.
    tokenizer: when given, markers that are tokens of their own are those tokens (free text never matches them).
    Up to four spaces or line breaks may stand around the markers.
    """
    close = _marker_token(marker, tokenizer)
    ending = f"free {close}" if close else "closed"
    start = opening and (_marker_token(opening, tokenizer) or json.dumps(opening))
    thought = f"{ending} GAP" if start is None else f"(GAP {start} {ending} GAP)?"
    free = "free: /(?s:.*)/" if close else f"closed[suffix={json.dumps(marker)}]: /(?s:.*)/"
    main = f"start: {thought} @answer\n{free}\nGAP: /[ \\n]{{0,4}}/\n"
    return _combined(main, {"answer": structured})


def either(first: StructuredOutput, second: StructuredOutput) -> StructuredOutput:
    """Output that follows one of the two: such as calls of tools, or an answer in a response format."""
    return _combined("start: @first | @second\n", {"first": first, "second": second})


def _combined(main: str, parts: dict[str, StructuredOutput]) -> StructuredOutput:
    """One grammar of a Lark text that refers to its parts as @name."""
    grammars: list[dict[str, Any]] = [{"name": "main", "lark_grammar": main}]
    for name, part in parts.items():
        source = _source(part)
        own = json.loads(source)["grammars"] if source.lstrip().startswith("{") else [{"lark_grammar": source}]
        grammars += [{**own[0], "name": name}, *own[1:]]
    return StructuredOutput("grammar", json.dumps({"grammars": grammars}))


def _marker_token(marker: str, tokenizer: Tokenizer | None) -> str | None:
    """`marker` as a reference to its token where that is a special one, which text cannot match."""
    token_id = None if tokenizer is None else tokenizer.token_id(marker)
    return f"<[{token_id}]>" if token_id is not None and token_id in tokenizer.all_special_ids else None


@lru_cache(maxsize=256)
def _compile(structured: StructuredOutput, trie: llguidance.LLTokenizer, vocab_size: int) -> Grammar:
    from llguidance import LLMatcher

    source = _source(structured)
    _validate(structured, source, trie)
    matcher = LLMatcher(trie, source, log_level=0)
    grammar = Grammar(matcher, vocab_size)
    GrammarState(grammar).mask()  # a grammar with no word at all is refused here, not when the request runs
    return grammar


@lru_cache(maxsize=4)
def _token_trie(tokenizer: Tokenizer, vocab_size: int, eos: tuple[int, ...]) -> llguidance.LLTokenizer:
    """Built once a model: 0.3 s for 49k tokens, 1 s for 152k.

    It is made of the tokenizer's own bytes and special tokens. (Given a tokenizer.json instead, llguidance takes every added
    token of the form <...> for a special one, so that no text could contain, say, Qwen's <tool_call>.)
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos[0])), eos_token=list(eos))


class _Vocabulary:
    """What llguidance reads of a tokenizer: its tokens' bytes by id (none for padding), its special ids, and a call."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int):
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(tokenizer.all_special_ids)

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _source(structured: StructuredOutput) -> str:
    """llguidance's own form of the grammar. Raises RequestError for what is malformed."""
    from llguidance import LLMatcher

    match structured.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(json.dumps(_json(structured.value, "the JSON schema")))
        case "regex":
            return LLMatcher.grammar_from_regex(structured.value)
        case "choice":
            choices = _json(structured.value, "the list of choices")
            if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
                raise RequestError(f"the choices are {structured.value[:200]}; they must be a list of at least one non-empty "
                                   "string.", param=PARAM)
            return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        case "grammar":
            return structured.value if structured.value.lstrip().startswith("{") else _lark(structured.value)
        case kind:
            raise RequestError(f"structured output of kind {kind!r} is not known; json_schema, json_object, regex, choice "
                               "and grammar are.", param=PARAM)


def _lark(text: str) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(text)
    except Exception as error:  # the translator raises plain Exception
        raise RequestError(f"the grammar is neither Lark nor GBNF: {error}", param=PARAM) from error


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} is not valid JSON: {error or 'it is nested too deeply'}", param=PARAM) from error


def _validate(structured: StructuredOutput, source: str, trie: llguidance.LLTokenizer | None) -> None:
    message = _fault(source, trie)
    if message is None:
        return
    if structured.kind == "json_schema":
        place, keyword = _locate(json.loads(structured.value), trie)
        where = f"at {place}" + (f", keyword {keyword!r}" if keyword else "")
        raise RequestError(f"the JSON schema cannot be honoured {where}: {_first_line(message)}", param=PARAM)
    raise RequestError(f"the {structured.kind} cannot be honoured: {message.strip()}", param=PARAM)


def _fault(source: str, trie: llguidance.LLTokenizer | None) -> str | None:
    from llguidance import LLMatcher

    failed, messages = LLMatcher.validate_grammar_with_warnings(source, trie)
    return messages[0] if failed else None


def _locate(schema: Any, trie: llguidance.LLTokenizer | None) -> tuple[str, str | None]:
    """The deepest sub-schema that fails by itself, as a JSON pointer ("#/properties/a"), and the keyword it fails with."""
    from llguidance import LLMatcher

    definitions = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}

    def fails(part: Any) -> bool:
        whole = {**definitions, **part} if isinstance(part, dict) else part
        return _fault(LLMatcher.grammar_from_json_schema(json.dumps(whole)), trie) is not None

    place, part = "#", schema
    while True:
        for step, child in _children(part):
            if fails(child):
                place, part = f"{place}/{step}", child
                break
        else:
            break
    keys = sorted(part, key="type".__eq__) if isinstance(part, dict) else ()  # "type" last: without it much is vacuous
    keyword = next((key for key in keys if not fails({k: v for k, v in part.items() if k != key})), None)
    return place, keyword


def _children(schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in _SUBSCHEMA_LISTS and isinstance(value, list):
            yield from ((f"{key}/{i}", child) for i, child in enumerate(value))
        elif key in _SUBSCHEMA_MAPS and isinstance(value, dict):
            yield from ((f"{key}/{_escape(name)}", child) for name, child in value.items())
        elif key in _SUBSCHEMAS:
            yield key, value


def _escape(name: str) -> str:
    """One step of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _first_line(text: str) -> str:
    """The message alone: llguidance appends a dump of its state."""
    return text.partition("\n<state>")[0].strip()
