"""Which architectures are built, and the class of each."""

from __future__ import annotations

from importlib import import_module

from zhilight.config.model import ModelConfig
from zhilight.errors import UnsupportedModel
from zhilight.models.model import Model

ARCHITECTURES = {
    "LlamaForCausalLM": "zhilight.models.llama:Llama",
    "MistralForCausalLM": "zhilight.models.llama:Llama",
    "Qwen2ForCausalLM": "zhilight.models.llama:Llama",
    "MiniCPMForCausalLM": "zhilight.models.llama:Llama",
}
"""`architectures` of config.json -> module:class. What tells the four of llama.py apart is in their ModelConfig."""


def build_model(config: ModelConfig, max_model_len: int | None = None) -> Model:
    """The model of `config`, without memory: `materialize` and the loader give it that.

    max_model_len: positions the rotary table holds; None takes the model's own limit.
    Raises UnsupportedModel, with the list of what is built, for any other architecture.
    """
    path = ARCHITECTURES.get(config.architecture)
    if path is None:
        raise UnsupportedModel(f"architecture {config.architecture!r} is not built; built are {', '.join(ARCHITECTURES)}.")
    module, name = path.split(":")
    return getattr(import_module(module), name)(config, max_model_len)
