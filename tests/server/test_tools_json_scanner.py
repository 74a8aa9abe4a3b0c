"""The scanner accepts exactly the objects that JSON's own parser accepts, and stops where they end."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zhilight.server.openai.tools.json_scanner import JSONScanner

PARTS = ["{", "}", "[", "]", ",", ":", '"', '"a"', '"b\\n"', '"\\u00e9"', "\\", "u", "0", "1", "-", ".", "e", "+", "5", "true",
         "false", "null", "nul", "NaN", " ", "\n", "\t", '{"a":1}', '"a":', "é"]


def scanned(text: str) -> tuple[bool, int]:
    """(whole object without bare control characters, characters taken)."""
    scanner = JSONScanner()
    for i, char in enumerate(text):
        try:
            scanner.push(char)
        except ValueError:
            return False, i
        if scanner.done:
            return not scanner.lenient, i + 1
    return False, len(text)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=lambda name: json.loads("")), dict)
    except ValueError:
        return False


@settings(max_examples=1500, deadline=None)
@given(parts=st.lists(st.sampled_from(PARTS), max_size=9), wrap=st.booleans())
def test_accepts_what_json_accepts(parts, wrap):
    text = '{"a": ' + "".join(parts) + "}" if wrap else "{" + "".join(parts)
    whole, taken = scanned(text)
    assert whole == is_object(text[:taken])
    if is_object(text.rstrip()):
        assert (whole, taken) == (True, len(text.rstrip()))


@pytest.mark.parametrize(("text", "taken"), [
    ('{"a": 01}', 8), ('{"a": 1.}', 8), ('{"a": -}', 7), ('{"a": "\\x"}', 8), ('{"a": "\\u12g"}', 11), ('{"a": tru}', 9),
    ('{"a" 1}', 5), ("{,", 1), ('{"a": 1,}', 8), ("[1]", 0)])
def test_faults_are_found_where_they_stand(text, taken):
    assert scanned(text) == (False, taken)


def test_keys_and_depth():
    scanner = JSONScanner()
    seen = []
    for char in '{"x": [1], "y\\u00e9": {"inner": 2}}':
        scanner.push(char)
        seen.append((scanner.depth, scanner.key))
    assert seen[0] == (1, None) and seen[7] == (2, "x") and seen[-2] == (1, "yé")
    assert max(depth for depth, _ in seen) == 2 and all(key != "inner" for _, key in seen)
