"""Command-line flags, made from the fields of the configuration dataclasses.

One table: a field `max_model_len` is `--max-model-len` (underscores work as well), with the aliases its metadata names. A
boolean is `--x` or `--no-x`. `--config FILE.yaml` holds the same names; a flag on the command line wins over the file.
"""

from __future__ import annotations

import argparse
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from zhilight.config.engine import EngineConfig
from zhilight.errors import ConfigError
from zhilight.server.config import ServerConfig

API_KEY_VARIABLE = "ZHILIGHT_API_KEY"


class PlainErrorParser(argparse.ArgumentParser):
    """Raises ConfigError instead of leaving the process, so that the caller prints every error the same way."""

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{message}. See `{self.prog} --help`.")


def add_config_arguments(parser: argparse.ArgumentParser, config_class: type, *, positional: str | None = None) -> None:
    """Add a flag for each field of `config_class`; `positional` names a field that may also stand alone."""
    hints = typing.get_type_hints(config_class)
    group = parser.add_argument_group(config_class.__name__)
    for option in fields(config_class):
        if option.name == positional:
            group.add_argument("positional_" + option.name, nargs="?", metavar=option.name.upper(),
                               default=argparse.SUPPRESS, help=option.metadata["help"])
        _add_flag(group, option, hints[option.name])


def _add_flag(group: Any, option: Field, hint: Any) -> None:
    kind, many = _value_type(hint)
    names = ["--" + option.name.replace("_", "-"), *option.metadata.get("aliases", ())]
    default = option.default if option.default is not MISSING else (
        option.default_factory() if option.default_factory is not MISSING else None)
    text = option.metadata["help"].replace("%", "%%")
    if default not in (None, (), ""):
        text += f" (default: {' '.join(default) if many else default})"
    settings: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **settings)
        if negatives := option.metadata.get("negative_aliases"):
            group.add_argument(*negatives, action="store_false", dest=option.name, default=argparse.SUPPRESS,
                               help=argparse.SUPPRESS)
    elif many:
        group.add_argument(*names, nargs="+", action="extend", metavar=option.name.upper(), **settings)
    else:
        group.add_argument(*names, type=kind, choices=option.metadata.get("choices"), **settings)


def _value_type(hint: Any) -> tuple[type, bool]:
    """(type of a value, whether the field is a tuple of them); `X | None` counts as X."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def make_server_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of `zhilight serve` and of the api_server module."""
    parser = PlainErrorParser(prog=prog, allow_abbrev=False, description="Serve a model with the OpenAI API.")
    add_server_arguments(parser)
    return parser


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE.yaml", help="YAML file with the same names; flags win over it")
    add_config_arguments(parser, EngineConfig, positional="model")
    add_config_arguments(parser, ServerConfig)


def normalise_flags(argv: Sequence[str]) -> list[str]:
    """`--max_model_len=8` -> `--max-model-len=8`; values are left alone."""
    result = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            word = name.replace("_", "-") + equals + value
        result.append(word)
    return result


def configs_from(arguments: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """Engine and server settings from parsed flags and the --config file. Raises ConfigError."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    values = read_config_file(given.pop("config")) if given.get("config") else {}
    if model := given.pop("positional_model", None):
        if given.get("model", model) != model:
            raise ConfigError(f"two models are given: {model!r} and --model {given['model']!r}. Give one.")
        given["model"] = model
    values.update(given)
    if not values.get("model"):
        raise ConfigError('no model is given. Name one: a folder, a GGUF file, a hub name, or "demo".')
    if not values.get("api_key") and os.environ.get(API_KEY_VARIABLE):
        values["api_key"] = [key.strip() for key in os.environ[API_KEY_VARIABLE].split(",") if key.strip()]
    if values.get("skip_tokenizer_init"):
        raise ConfigError("skip_tokenizer_init is set, but a server needs the tokenizer. Leave it out.")
    return _build(EngineConfig, values), _build(ServerConfig, values)


def engine_config_from(arguments: argparse.Namespace, **forced: Any) -> EngineConfig:
    """Engine settings alone, for the commands without a server."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    if model := given.pop("positional_model", None):
        given["model"] = model
    if not given.get("model"):
        raise ConfigError('no model is given. Name one: a folder, a GGUF file, a hub name, or "demo".')
    return _build(EngineConfig, given | forced)


def _build(config_class: type, values: dict[str, Any]) -> Any:
    names = {option.name for option in fields(config_class)}
    return config_class(**{name: tuple(value) if isinstance(value, list) else value
                           for name, value in values.items() if name in names})


def read_config_file(path: str) -> dict[str, Any]:
    """Settings of a YAML file, by field name. Raises ConfigError for an unknown name or a wrong type."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold `name: value` lines.")
    known = _known_names()
    values = {}
    for name, value in content.items():
        if str(name).replace("_", "-") not in known:
            raise ConfigError(f"--config {path}: unknown name {name!r}. Names are those of the flags, without dashes.")
        option, hint, positive = known[str(name).replace("_", "-")]
        if value is not None:
            checked = _checked(path, name, value, hint)
            values[option] = checked if positive else not checked
    return values


def _known_names() -> dict[str, tuple[str, Any, bool]]:
    """Flag name without dashes -> (field, type, False when the flag turns the field off)."""
    known = {}
    for config_class in (EngineConfig, ServerConfig):
        hints = typing.get_type_hints(config_class)
        for option in fields(config_class):
            entry = (option.name, hints[option.name])
            known[option.name.replace("_", "-")] = (*entry, True)
            for alias in option.metadata.get("aliases", ()):
                known[alias.lstrip("-").replace("_", "-")] = (*entry, True)
            for alias in option.metadata.get("negative_aliases", ()):
                known[alias.lstrip("-").replace("_", "-")] = (*entry, False)
    return known


def _checked(path: str, name: str, value: Any, hint: Any) -> Any:
    kind, many = _value_type(hint)
    if many:
        value = value if isinstance(value, list) else [value]
        if not all(isinstance(item, (str, int)) for item in value):
            raise ConfigError(f"--config {path}: {name} is {value!r}; it must be a list of texts.")
        return [str(item) for item in value]
    fits = isinstance(value, (int, float) if kind is float else kind) and (kind is bool or not isinstance(value, bool))
    if not fits:
        raise ConfigError(f"--config {path}: {name} is {value!r}; it must be of type {kind.__name__}.")
    return value


def flags_table() -> str:
    """docs/flags.md: `python -m zhilight.server.arguments > docs/flags.md`."""
    lines = ["# Flags of `zhilight serve`", "",
             "Made from the configuration classes by `python -m zhilight.server.arguments`. Booleans are `--x` or `--no-x`.",
             "The names, with - or _, are also those of `--config FILE.yaml`, and the engine's those of `LLM(...)`."]
    for config_class in (EngineConfig, ServerConfig):
        lines += ["", f"## {config_class.__name__}", "", "| Flag | Default | Meaning |", "|---|---|---|"]
        for option in fields(config_class):
            aliases = [*option.metadata.get("aliases", ()), *option.metadata.get("negative_aliases", ())]
            names = ", ".join(f"`{name}`" for name in ("--" + option.name.replace("_", "-"), *aliases))
            default = option.default if option.default is not MISSING else (
                " ".join(option.default_factory()) if option.default_factory is not MISSING else "required")
            choices = option.metadata.get("choices")
            meaning = option.metadata["help"] + (f" ({', '.join(map(str, choices))})" if choices else "")
            lines.append(f"| {names} | {'' if default is None else default} | {meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(flags_table(), end="")
