"""Sampling settings that a model recommends for itself."""

from __future__ import annotations

from typing import Any

from zhilight.config.model import ModelConfig
from zhilight.config.sampling import SamplingParams

_NAMES = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
          "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}


def default_sampling_params(model_config: ModelConfig, **overrides: Any) -> SamplingParams:
    """SamplingParams with the values of generation_config.json where it has some. `overrides` win over them."""
    found = {ours: model_config.generation_defaults[theirs] for theirs, ours in _NAMES.items()
             if model_config.generation_defaults.get(theirs) is not None}
    return SamplingParams(**{**found, **overrides})
