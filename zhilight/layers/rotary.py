"""Rotary position embedding: one table of cosines and sines for all layers, made on the host at load.

The formulas are those of transformers' modeling_rope_utils: frequencies in float32, angle = position * frequency in
float32. The factor that yarn and longrope put on attention (mscale) is folded into the table: it scales q and k both.

transformers chooses frequencies by the length of the running sequence for two kinds; a table serves all lengths, so
the choice is made once, by the number of positions the engine is set up for (max_model_len):
  dynamic   the base that transformers would use for a sequence of max_model_len tokens; up to the model's original
            length that is the plain base.
  longrope  long_factor when max_model_len exceeds the original length, else short_factor.

Source  Su et al. 2021, arXiv:2104.09864; yarn: Peng et al. 2023, arXiv:2309.00071; longrope: Ding et al. 2024, arXiv:2402.13753
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from zhilight.config.model import ModelConfig, RopeConfig
from zhilight.errors import ConfigError, UnsupportedModel
from zhilight.layers.module import Constant, Module


class Rotary(Module):
    """The table of a model. num_positions: longest context; None takes the model's own limit."""

    def __init__(self, config: ModelConfig, num_positions: int | None = None):
        num_positions = num_positions or config.max_context_len
        self.cos_sin = Constant(lambda: rope_table(config.rope, config.head_dim, num_positions,
                                                   config.max_position_embeddings))


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int, max_position_embeddings: int) -> np.ndarray:
    """Cosines of the rotary_dim / 2 frequencies, then their sines: [num_positions, rotary_dim] float32.

    Raises UnsupportedModel for an unknown kind, ConfigError when the kind's parameters are missing or of a wrong length.
    """
    if rope.kind not in KINDS:
        raise UnsupportedModel(f"rope kind {rope.kind!r} is not built; built are {', '.join(KINDS)}.")
    dim = rope.rotary_dim or head_dim
    exponents = np.arange(0, dim, 2, dtype=np.float64) / dim
    try:
        frequencies, factor = KINDS[rope.kind](rope, exponents, num_positions, max_position_embeddings)
    except KeyError as error:
        raise ConfigError(f"rope kind {rope.kind!r} needs {error.args[0]!r}, which the model's rope_scaling lacks: it "
                          f"has {', '.join(rope.parameters) or 'nothing'}.") from error
    positions = np.arange(num_positions, dtype=np.float32)
    angles = positions[:, None] * frequencies.astype(np.float32)
    table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
    if factor != 1.0:
        table *= np.float32(factor)
    return table


def _default(rope: RopeConfig, exponents: np.ndarray, num_positions: int, limit: int) -> tuple[np.ndarray, float]:
    return rope.theta ** -exponents, 1.0


def _linear(rope: RopeConfig, exponents: np.ndarray, num_positions: int, limit: int) -> tuple[np.ndarray, float]:
    return rope.theta ** -exponents / rope.parameters["factor"], 1.0


def _dynamic(rope: RopeConfig, exponents: np.ndarray, num_positions: int, limit: int) -> tuple[np.ndarray, float]:
    factor, dim = rope.parameters["factor"], 2 * len(exponents)
    length = max(num_positions, limit)
    theta = rope.theta * (factor * length / limit - (factor - 1)) ** (dim / (dim - 2))
    return theta ** -exponents, 1.0


def _llama3(rope: RopeConfig, exponents: np.ndarray, num_positions: int, limit: int) -> tuple[np.ndarray, float]:
    factor, original = rope.parameters["factor"], _original_length(rope, limit)
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    frequencies = rope.theta ** -exponents
    turns = original * frequencies / (2 * math.pi)     # of the original context
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * ((1 - smooth) / factor + smooth), 1.0


def _yarn(rope: RopeConfig, exponents: np.ndarray, num_positions: int, limit: int) -> tuple[np.ndarray, float]:
    get, original = rope.parameters.get, _original_length(rope, limit)
    factor = get("factor") or limit / original
    dim = 2 * len(exponents)

    def dimension(turns: float) -> float:
        """The dimension whose frequency makes that many turns in the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(get("beta_fast") or 32), dimension(get("beta_slow") or 1)
    if get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low if high != low else 0.001), 0, 1)
    frequencies = rope.theta ** -exponents
    return frequencies * (ramp / factor + 1 - ramp), _yarn_attention_factor(rope.parameters, factor)


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rope: RopeConfig, exponents: np.ndarray, num_positions: int, limit: int) -> tuple[np.ndarray, float]:
    original = _original_length(rope, limit)
    name = "long_factor" if num_positions > original else "short_factor"
    factors = np.asarray(rope.parameters[name], np.float64)
    if factors.shape != exponents.shape:
        raise ConfigError(f"rope_scaling's {name} has {factors.size} values; a head rotates {exponents.size} pairs.")
    attention_factor = rope.parameters.get("attention_factor")
    if attention_factor is None:
        factor = rope.parameters.get("factor") or limit / original
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return rope.theta ** -exponents / factors, attention_factor


def _original_length(rope: RopeConfig, limit: int) -> int:
    return rope.parameters.get("original_max_position_embeddings") or limit


KINDS = {"default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
         "longrope": _longrope}
"""rope kind -> function(rope, exponents, num_positions, max_position_embeddings) -> (frequencies, attention factor)."""
