"""Templates behave as model cards expect, and whatever goes wrong in one is the request's error."""

from __future__ import annotations

import json

import pytest

from zhilight.errors import RequestError
from zhilight.tokenization.chat_template import choose_template, render
from zhilight.tokenization.tokenizer import load_tokenizer

USER = [{"role": "user", "content": "<b>你好</b>"}]


def rendered(template: str, messages=USER, **variables) -> str:
    return render(template, messages, continue_final_message=False, variables=variables)


def test_the_demo_models_own_template(demo_tokenizer):
    text = demo_tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    assert text == ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
                    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")


def test_tojson_escapes_neither_html_nor_unicode():
    assert rendered("{{ messages[0].content | tojson }}") == '"<b>你好</b>"'
    assert rendered("{{ tools | tojson(indent=1) }}", tools=[{"b": 1, "a": 2}]) == '[\n {\n  "b": 1,\n  "a": 2\n }\n]'


def test_blocks_are_trimmed_and_loops_controlled():
    template = "{% for i in range(5) %}\n  {% if i == 3 %}\n{% break %}\n  {% endif %}\n{{ i }}{% endfor %}"
    assert rendered(template) == "012"


def test_generation_blocks_render_their_content():
    template = "{% set x = 'a' %}{% for m in messages %}{% generation %}{{ x }}{{ m.role }}{% endgeneration %}!{% endfor %}"
    assert rendered(template) == "auser!"


def test_strftime_now_and_variables():
    assert len(rendered("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert rendered("{{ bos_token }}{{ missing }}{{ enable_thinking }}", bos_token="<s>", enable_thinking=False) == "<s>False"


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}"])
def test_a_templates_own_complaint(template):
    with pytest.raises(RequestError, match="roles must alternate") as raised:
        rendered(template)
    assert raised.value.param == "messages"


@pytest.mark.parametrize("template", ["{{ messages[7].content.x }}", "{{ messages + 1 }}", "{{ ''.__class__.__mro__ }}",
                                      "{{ messages.append(1) }}", "{% for i in range(10**9) %}{% endfor %}",
                                      "{{ cycler.__init__.__globals__ }}"])
def test_faults_and_escapes_inside_a_template(template):
    with pytest.raises(RequestError) as raised:
        rendered(template)
    assert raised.value.param == "messages"


def test_a_syntax_error_names_its_line():
    with pytest.raises(RequestError, match="line 2") as raised:
        rendered("\n{% if %}")
    assert raised.value.param == "chat_template"


@pytest.mark.parametrize(("template", "content", "expected"), [
    ("{{ messages[-1].content }}<end>", "so far ", "so far "),
    ("{{ messages[-1].content | trim }}<end>", "so far ", "so far"),
    ("{{ messages[-1].content | trim }}<end>", "", ""),
    ("{% for p in messages[-1].content %}{{ p.text }}{% endfor %}<end>", [{"text": "a"}, {"text": "b "}], "ab "),
])
def test_continue_final_message_ends_with_its_text(template, content, expected):
    messages = [*USER, {"role": "assistant", "content": content}]
    assert render(template, messages, continue_final_message=True, variables={}) == expected
    assert messages[-1]["content"] == content, "the caller's messages are left alone"


@pytest.mark.parametrize("final", [{"role": "assistant"}, {"role": "assistant", "content": []}])
def test_nothing_to_continue(final):
    with pytest.raises(RequestError) as raised:
        render("{{ messages[-1].content }}", [final], continue_final_message=True, variables={})
    assert raised.value.param == "continue_final_message"


def test_a_template_that_drops_the_final_message_cannot_continue_it():
    with pytest.raises(RequestError, match="does not render"):
        render("x", USER, continue_final_message=True, variables={})


def test_continuing_and_opening_a_turn_exclude_each_other(demo_tokenizer):
    with pytest.raises(RequestError, match="add_generation_prompt"):
        demo_tokenizer.apply_chat_template(USER, continue_final_message=True)
    text = demo_tokenizer.apply_chat_template([*USER, {"role": "assistant", "content": "Hi"}], continue_final_message=True,
                                              add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\nHi")


@pytest.mark.parametrize("template", ["{{ a | tojson }}", "{{ a }}", "{{ 'x' + a + 'y' }}", "{{ 'x' ~ a ~ 'y' }}"])
def test_call_arguments_suit_templates_that_want_a_mapping_or_text(template):
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"k": "é", "n": 1}}}]}]
    text = rendered("{% set a = messages[0].tool_calls[0].function.arguments %}" + template, messages)
    assert text.strip("xy") == '{"k": "é", "n": 1}'
    assert rendered("{{ messages[0].tool_calls[0].function.arguments.k }}", messages) == "é"
    assert type(messages[0]["tool_calls"][0]["function"]["arguments"]) is dict


def test_choice_among_named_templates():
    templates = {"default": "D", "tool_use": "T", "rag": "R"}
    assert choose_template(templates, None, False) == "D"
    assert choose_template(templates, None, True) == "T"
    assert choose_template(templates, "rag", True) == "R"
    assert choose_template(templates, "{{ text }}", True) == "{{ text }}"
    with pytest.raises(RequestError, match="rag"):
        choose_template({"rag": "R"}, None, False)
    with pytest.raises(RequestError, match="--chat-template"):
        choose_template({}, None, False)


def test_templates_are_found_in_every_place_of_a_folder(demo_tokenizer, tmp_path):
    demo_tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(tmp_path).settings.chat_templates == {"default": "D", "tool_use": "T"}
    (tmp_path / "chat_template.jinja").write_text("你好{{ messages | length }}", "utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template(USER) == "你好1"
    assert tokenizer.apply_chat_template(USER, chat_template="rag") == "R"
