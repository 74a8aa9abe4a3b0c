"""Grammars are refused with their place, and masks lead to outputs that satisfy them, for two kinds of vocabulary."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from zhilight.config.sampling import StructuredOutput
from zhilight.engine.structured import GrammarState, after_marker, check_grammar, compile_grammar
from zhilight.errors import RequestError
from zhilight.tokenization.tokenizer import load_tokenizer

PADDED = 49152 + 40


@pytest.fixture(scope="module")
def tokenizer(demo_source):
    return load_tokenizer(demo_source.path)


def state(tokenizer, kind, value="", **options) -> GrammarState:
    if not isinstance(value, str):
        value = json.dumps(value)
    return GrammarState(compile_grammar(StructuredOutput(kind, value), tokenizer, vocab_size=PADDED, **options))


def allowed(state: GrammarState) -> set[int]:
    bits = np.unpackbits(state.mask().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def accepts(tokenizer, state: GrammarState, text: str) -> bool:
    """Whether each token of `text` is allowed in turn, and the end after them."""
    for token in tokenizer.encode(text):
        if token not in allowed(state):
            return False
        state.advance(token)
    return tokenizer.eos_token_id in allowed(state)


def sample(tokenizer, state: GrammarState, seed: int, limit: int = 400) -> str:
    """A random walk through the masks; short tokens that end things are preferred so that it ends."""
    rng = np.random.default_rng(seed)
    ids = []
    for _ in range(limit):
        choices = allowed(state)
        if tokenizer.eos_token_id in choices:
            return tokenizer.decode(ids)
        ends = [i for i in choices if tokenizer.token(i) in ('"', "}", "]", '"}', "1", ",", ":", '":')]
        token = int(rng.choice(ends if ends and rng.random() < 0.7 else sorted(choices)))
        state.advance(token)
        ids.append(token)
    raise AssertionError(f"no end within {limit} tokens: {tokenizer.decode(ids)}")


CASES = [
    ("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"],
                     "additionalProperties": False},
     ['{"a": 1}', '{"a":-7,"b":"x"}'], ['{"b": "x"}', '{"a": "1"}', '{"a": 1, "c": 2}']),
    ("json_object", "", ["{}", '{"k": [1, {"x": null}]}'], ["[]", "1", "null"]),
    ("regex", r"\d{3}-[a-z]+", ["123-ab"], ["12-ab", "123-"]),
    ("choice", ["red", "dark red", 'a"b\\c', "你好\n"], ["red", "dark red", 'a"b\\c', "你好\n"], ["dark", "blue"]),
    ("grammar", 'start: "a" item+\nitem: /[0-9]/ ";"', ["a1;", "a1;2;"], ["a", "1;"]),
    ("grammar", 'root ::= "a" item+\nitem ::= [0-9] ";"', ["a1;", "a1;2;"], ["a", "1;"]),
]


@pytest.mark.parametrize(("kind", "value", "good", "bad"), CASES)
def test_each_kind_allows_its_words_and_no_others(tokenizer, kind, value, good, bad):
    for text in good:
        assert accepts(tokenizer, state(tokenizer, kind, value), text), text
    for text in bad:
        assert not accepts(tokenizer, state(tokenizer, kind, value), text), text


@pytest.mark.parametrize("seed", range(5))
def test_what_the_masks_allow_fits_the_schema(tokenizer, seed):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 20},
                                               "s": {"type": "string", "maxLength": 5},
                                               "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
              "required": ["n", "s", "l"], "additionalProperties": False}
    text = sample(tokenizer, state(tokenizer, "json_schema", schema), seed)
    value = json.loads(text)
    assert set(value) == {"n", "s", "l"} and 0 <= value["n"] <= 20 and len(value["s"]) <= 5
    assert all(isinstance(item, bool) for item in value["l"]) and len(value["l"]) <= 2


@pytest.mark.parametrize("schema", [{}, {"type": "object"},
                                    {"type": "object", "properties": {}, "additionalProperties": False}])
def test_an_empty_object_terminates(tokenizer, schema):
    grammar = state(tokenizer, "json_schema", schema)
    for token in tokenizer.encode("{}"):
        grammar.advance(token)
    assert grammar.is_finished
    assert allowed(grammar) == {tokenizer.eos_token_id}


def test_the_end_is_allowed_exactly_where_the_grammar_may_end(tokenizer):
    grammar = state(tokenizer, "regex", "(ab)+", eos_token_ids=(2, 0))
    for char, may_end in (("", False), ("a", False), ("b", True), ("a", False), ("b", True)):
        for token in tokenizer.encode(char):
            grammar.advance(token)
        assert ({0, 2} <= allowed(grammar)) is may_end and bool({0, 2} & allowed(grammar)) is may_end
    assert not grammar.is_finished
    grammar.advance(0)
    assert grammar.is_finished


def test_padding_and_special_tokens_are_never_allowed(tokenizer):
    mask = state(tokenizer, "regex", r"(?s:.*)").mask()
    assert mask.dtype == np.uint32 and mask.shape == (-(-PADDED // 32),)
    ids = allowed(state(tokenizer, "regex", r"(?s:.*)"))
    assert max(ids) < 49152 and len(ids) > 48000
    assert ids & tokenizer.all_special_ids == {tokenizer.eos_token_id}


def test_the_mask_is_written_where_asked(tokenizer):
    out = np.zeros(-(-PADDED // 32), np.uint32)
    grammar = state(tokenizer, "regex", "a")
    assert grammar.mask(out) is out
    assert np.array_equal(out, grammar.mask())


def test_states_of_one_grammar_do_not_touch_each_other(tokenizer):
    grammar = compile_grammar(StructuredOutput("regex", "ab|ac"), tokenizer)
    first, second = GrammarState(grammar), GrammarState(grammar)
    first.advance(tokenizer.encode("a")[0])
    assert not second.is_finished
    assert allowed(second) == allowed(GrammarState(grammar)) != allowed(first)


def test_a_byte_fallback_vocabulary(tmp_path, tokenizer):
    from zhilight.tokenization.sentencepiece_model import SentencePieceModel, build_sentencepiece
    from zhilight.tokenization.tokenizer import Tokenizer, TokenizerSettings

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
    model = SentencePieceModel(pieces, [0.0] * 259 + [-1.0, -2.0, -3.0], [2, 3, 3] + [6] * 256 + [1] * 3, "bpe", True)
    small = Tokenizer(build_sentencepiece(model), TokenizerSettings({"eos_token": "</s>"}))
    grammar = GrammarState(compile_grammar(StructuredOutput("choice", json.dumps([" a", "é"])), small))
    assert allowed(grammar) == {3 + 0x20, 3 + 0xC3, 259, 261}
    grammar.advance(3 + 0xC3)
    assert allowed(grammar) == {3 + 0xA9}


@pytest.mark.parametrize(("schema", "place", "keyword"), [
    ({"type": "objekt"}, "#", "type"),
    ({"type": "object", "properties": {"a/b": {"type": "array", "items": {"type": "strin"}}}},
     "#/properties/a~1b/items", "type"),
    ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "#/properties/a", "not"),
    ({"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": True}]}, "#/anyOf/1", "uniqueItems"),
    ({"$defs": {"x": {"type": "string", "format": "nonsense"}}, "$ref": "#/$defs/x"}, "#/$defs/x", "format"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/missing"}}}, "#/properties/a", "$ref"),
    ({"type": "string", "pattern": "(?=a)b"}, "#", "pattern"),
    ({"type": "integer", "minimum": 5, "maximum": 1}, "#", "minimum"),
])
def test_a_schema_that_cannot_be_honoured_names_place_and_keyword(tokenizer, schema, place, keyword):
    for check in (lambda s: compile_grammar(s, tokenizer), check_grammar):
        with pytest.raises(RequestError, match=re.escape(f"at {place}, keyword {keyword!r}")) as raised:
            check(StructuredOutput("json_schema", json.dumps(schema)))
        assert raised.value.param == "response_format"


@pytest.mark.parametrize(("kind", "value", "message"), [
    ("json_schema", '{"type":', "not valid JSON"), ("json_schema", "[1]", "object or boolean"),
    ("regex", "[a", "unclosed"), ("regex", r"(a)\1", "backreferences"),
    ("choice", "[]", "at least one"), ("choice", '["a", 1]', "at least one"), ("choice", "a", "not valid JSON"),
    ("grammar", 'start: "a" (', "Expected token"), ("grammar", "start: b", "unknown name"),
    ("grammar", "", "neither Lark nor GBNF"),
    ("grammar", 'root ::= "a" (', "neither Lark nor GBNF"), ("grammar", 'start: a\na: a "x"', "no further token"),
    ("xml", "", "not known"),
])
def test_malformed_grammars_are_refused(tokenizer, kind, value, message):
    with pytest.raises(RequestError, match=message):
        compile_grammar(StructuredOutput(kind, value), tokenizer)


def test_a_token_outside_the_grammar_ends_the_request(tokenizer):
    grammar = state(tokenizer, "regex", "a")
    with pytest.raises(RequestError, match="not allowed"):
        grammar.advance(tokenizer.encode("b")[0])
    with pytest.raises(RequestError, match="no further token"):
        grammar.mask()


def test_a_grammar_too_complex_ends_the_request_only(tokenizer):
    grammar = state(tokenizer, "regex", "a{1000000}")
    with pytest.raises(RequestError, match="too many expressions"):
        for _ in range(3):
            grammar.mask()
            grammar.advance(tokenizer.encode("a")[0])


@pytest.mark.parametrize(("kind", "value", "answer"), [
    ("json_schema", '{"type": "object"}', '{"a": 1}'), ("choice", '["yes"]', "yes"), ("regex", "[0-9]+", "12"),
    ("grammar", 'start: "x"', "x")])
def test_an_answer_after_a_thought(tokenizer, kind, value, answer):
    def fits(text: str, starts_open: bool) -> bool:
        structured = after_marker(StructuredOutput(kind, value), "</think>", None if starts_open else "<think>")
        return accepts(tokenizer, GrammarState(compile_grammar(structured, tokenizer)), text)

    assert fits(f"hm {{ no.</think>\n\n{answer}", True)
    assert fits(f"hm</think>{answer}", True)
    assert not fits("hm", True) and not fits(f"{answer}", True) and not fits("hm</think>hm", True)
    assert fits(f"<think>\nhm {{ no.\n</think>\n\n{answer}", False)
    assert fits(answer, False)
    assert not fits(f"hm</think>{answer}", False) and not fits("<think>hm</think>hm", False)


@pytest.mark.parametrize("special", [True, False])
def test_thought_markers_that_are_tokens(tokenizer, special):
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    from zhilight.tokenization.tokenizer import Tokenizer, TokenizerSettings

    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_tokens([AddedToken(marker, special=special, normalized=False) for marker in ("<think>", "</think>")])
    extended = Tokenizer(backend, TokenizerSettings({"eos_token": "<|im_end|>"}))
    for opening, text in ((None, "hm\n</think>\n\nyes"), ("<think>", "<think>\nhm</think>yes"), ("<think>", "yes")):
        structured = after_marker(StructuredOutput("choice", '["yes"]'), "</think>", opening, extended)
        assert accepts(extended, GrammarState(compile_grammar(structured, extended)), text)
        assert not accepts(extended, GrammarState(compile_grammar(structured, extended)), text[:-3] + "no")
