"""Sampling flags that `generate` and `chat` share."""

from __future__ import annotations

import argparse
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zhilight.config.engine import EngineConfig
from zhilight.server.arguments import add_config_arguments, engine_config_from

if TYPE_CHECKING:
    from zhilight.config.sampling import SamplingParams
    from zhilight.engine.llm import LLM

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")


def add_model_and_sampling(parser: argparse.ArgumentParser, *, max_tokens: int) -> None:
    add_config_arguments(parser, EngineConfig, positional="model")
    group = parser.add_argument_group("sampling", "what is left out is as the model's generation_config.json says")
    group.add_argument("--max-tokens", type=int, default=max_tokens, help=f"tokens to generate (default: {max_tokens})")
    group.add_argument("--temperature", type=float, help="0 is greedy")
    group.add_argument("--top-p", type=float, help="keep the tokens that make up this probability")
    group.add_argument("--top-k", type=int, help="keep that many tokens")
    group.add_argument("--min-p", type=float, help="drop tokens below this share of the best one's probability")
    group.add_argument("--repetition-penalty", type=float, help="above 1 discourages what was said before")
    group.add_argument("--stop", nargs="+", help="texts that end the answer")
    group.add_argument("--verbose", action="store_true", help="show the engine's log")


def load(arguments: argparse.Namespace) -> LLM:
    """The model, with the engine's log on stderr only when asked for (warnings always)."""
    config = engine_config_from(arguments)
    from zhilight.engine.llm import LLM

    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING,
                        format="%(levelname)s %(name)s: %(message)s")
    settings = {name: value for name, value in vars(config).items() if name != "model"}
    return LLM(config.model, **settings)


def sampling_params(llm: LLM, arguments: argparse.Namespace, **more: Any) -> SamplingParams:
    """The model's defaults, overruled by the flags. Raises RequestError."""
    given = {name: getattr(arguments, name) for name in _FIELDS if getattr(arguments, name) is not None}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    return replace(llm.default_sampling_params(), max_tokens=arguments.max_tokens, **given, **more)
