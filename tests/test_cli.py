"""The command line: flags from one table, files of settings, plain errors, generate and chat on a tiny model."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.tiny_llama import write_tiny_llama
from zhilight import cli
from zhilight.config.engine import EngineConfig
from zhilight.errors import ConfigError
from zhilight.server.arguments import configs_from, flags_table, make_server_parser, normalise_flags
from zhilight.server.config import ServerConfig
from zhilight.version import __version__


def parse(*words: str) -> tuple[EngineConfig, ServerConfig]:
    return configs_from(make_server_parser("test").parse_args(normalise_flags(words)))


def test_every_field_has_a_flag() -> None:
    text = make_server_parser("test").format_help()
    for config_class in (EngineConfig, ServerConfig):
        for option in dataclasses.fields(config_class):
            assert "--" + option.name.replace("_", "-") in text, option.name
            assert option.metadata["help"]


def test_the_documented_flags_are_those_of_the_classes() -> None:
    documented = Path(__file__).parents[1] / "docs" / "flags.md"
    assert documented.read_text() == flags_table(), "run: python -m zhilight.server.arguments > docs/flags.md"


def test_defaults_are_those_of_the_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZHILIGHT_API_KEY", raising=False)
    assert parse("demo") == (EngineConfig(model="demo"), ServerConfig())


@pytest.mark.parametrize(("words", "field", "value"), [
    (["--max-model-len", "99"], "max_model_len", 99), (["--max_model_len=99"], "max_model_len", 99),
    (["-tp", "1"], "tensor_parallel_size", 1), (["--tensor-parallel", "1"], "tensor_parallel_size", 1),
    (["-q", "awq"], "quantization", "awq"), (["--dyn-max-batch-size", "8"], "max_num_seqs", 8),
    (["--enable-prefix-caching"], "enable_prefix_caching", True),
    (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
    (["--gpu-memory-utilization", "0.5"], "gpu_memory_utilization", 0.5),
    (["--kv-cache-dtype", "int8"], "kv_cache_dtype", "int8"),
    (["--port", "1"], "port", 1), (["--served-model-name", "a", "b"], "served_model_name", ("a", "b")),
    (["--api-key", "k1", "--api-key", "k2"], "api_key", ("k1", "k2")), (["--enable-log-requests"], "log_requests", True),
    (["--disable-log-requests"], "log_requests", False), (["--disable-access-log"], "access_log", False),
    (["--allowed-origins", "https://a"], "allowed_origins", ("https://a",)), (["--root-path", "/x"], "root_path", "/x"),
    (["--response-role", "bot"], "response_role", "bot"), (["--chat-template", "{{ 1 }}"], "chat_template", "{{ 1 }}"),
    (["--enable-reasoning", "--reasoning-parser", "qwen3"], "reasoning_parser", "qwen3"),
    (["--no-playground"], "playground", False),
    (["--uvicorn-log-level", "error"], "log_level", "error"), (["--tool-call-parser", "hermes"], "tool_call_parser", "hermes"),
])
def test_flags(words: list[str], field: str, value: Any) -> None:
    engine, server = parse("--model-path", "demo", *words)
    owner = server if hasattr(server, field) else engine
    assert getattr(owner, field) == value


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZHILIGHT_API_KEY", "a, b")
    assert parse("demo")[1].api_key == ("a", "b")
    assert parse("demo", "--api-key", "c")[1].api_key == ("c",)


def test_settings_file_and_flags_over_it(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("model-path: demo\nport: 9\nmax_num_seqs: 3\nserved-model-name: [x, y]\nenable-prefix-caching: false\n"
                    "disable-log-requests: true\ngpu_memory_utilization: 1\n")
    engine, server = parse("--config", str(path), "--port", "10")
    assert (engine.model, engine.max_num_seqs, engine.enable_prefix_caching) == ("demo", 3, False)
    assert (server.port, server.served_model_name, server.log_requests) == (10, ("x", "y"), False)


@pytest.mark.parametrize(("text", "words"), [
    ("modle: demo", "unknown name 'modle'"), ("port: many", "type int"), ("port: true", "type int"), ("- a", "name: value"),
    ("a: [", "not YAML"), ("enforce_eager: 1", "type bool"), ("api_key: {a: 1}", "list of texts")])
def test_bad_settings_files(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parse("demo", "--config", str(path))


@pytest.mark.parametrize(("words", "message"), [
    (["serve"], "no model is given"), (["serve", "demo", "--port", "x"], "--port: invalid int value"),
    (["serve", "demo", "--model", "other"], "two models"), (["serve", "demo", "--nonsense"], "unrecognized arguments"),
    (["serve", "demo", "--device", "tpu"], "invalid choice: 'tpu'"), (["serve", "demo", "--port", "-1"], "port is -1"),
    (["serve", "demo", "--ssl-keyfile", "k"], "go together"), (["serve", "demo", "--root-path", "x/"], "root_path"),
    (["serve", "demo", "--max-num-seqs", "0"], "max_num_seqs is 0"), (["serve", "demo", "--config", "/no/file"], "--config"),
    (["serve", "demo", "--skip-tokenizer-init"], "tokenizer"),
    (["serve", "/no/model", "--tool-call-parser", "x"], "tool_call_parser is 'x'"),
    (["serve", "/no/model", "--chat-template", "/no/file"], "neither a readable file nor Jinja text"),
    (["serve", "/no/model", "--ssl-keyfile", "/no/key", "--ssl-certfile", "/no/file"], "cannot be used"),
    (["fly"], "there is no command 'fly'"), (["generate", "/no/such/model", "--prompt", "x"], "/no/such/model"),
])
def test_mistakes_are_one_plain_message(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) in (1, 2)
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert not printed.out


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"zhilight {__version__}\n"
    assert cli.main(["--help"]) == 0
    usage = capsys.readouterr().out
    assert all(name in usage for name in cli.COMMANDS)
    assert cli.main([]) == 2


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_shows_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"zhilight {name}" in capsys.readouterr().out


def test_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "zhilight", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"zhilight {__version__}\n"


def test_help_is_quick_and_light() -> None:
    """`zhilight --help` must not import what only an engine needs."""
    script = ("import sys; from zhilight import cli; cli.main(['--help']); "
              "bad = {'numba', 'transformers', 'aiohttp', 'numpy'} & set(sys.modules); assert not bad, bad")
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("model")))


FLAGS = ["--device", "cpu", "--cpu-kv-cache-gb", "0.05", "--temperature", "0"]


def test_generate(folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["generate", folder, "--prompt", "abc", "--max-tokens", "6", *FLAGS]) == 0
    streamed = capsys.readouterr().out.removesuffix("\n")
    assert streamed
    assert cli.main(["generate", folder, "--prompt", "abc", "xyz", "--max-tokens", "6", "--json", *FLAGS]) == 0
    items = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [item["prompt"] for item in items] == ["abc", "xyz"]
    assert items[0]["text"] == streamed
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc"))
    assert cli.main(["generate", folder, "--max-tokens", "6", *FLAGS]) == 0
    assert capsys.readouterr().out.removesuffix("\n") == streamed
    assert cli.main(["generate", folder, "--prompt", "abc", "--temperature", "-1", "--device", "cpu",
                     "--cpu-kv-cache-gb", "0.05"]) == 2
    assert "temperature is -1.0" in capsys.readouterr().err


def test_chat_keeps_and_forgets_its_history(folder: str, capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    def talk(*lines: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
        monkeypatch.setattr("builtins.input", lambda prompt="": _read(sys.stdin))
        assert cli.main(["chat", folder, "--max-tokens", "5", *FLAGS]) == 0
        return capsys.readouterr().out.split("\n")

    first = talk("hello", "/exit")
    again = talk("hello", "hello", "/reset", "hello")
    assert again[0] == first[0]
    assert "(forgotten)" in again
    assert again[again.index("(forgotten)") + 1] == first[0]


def _read(stream: Any) -> str:
    line = stream.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
