"""Read a checkpoint's own description: config.json and generation_config.json, or GGUF metadata, into a ModelConfig.

Whatever is not built raises UnsupportedModel, naming it and what is built: a model is never run as something close to it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zhilight.config.model import ModelConfig, RopeConfig
from zhilight.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    from zhilight.weights.source import ModelSource

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "MiniCPMForCausalLM")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")
_BY_MODEL_TYPE = {"llama": ARCHITECTURES[0], "mistral": ARCHITECTURES[1], "qwen2": ARCHITECTURES[2],
                  "minicpm": ARCHITECTURES[3]}


def read_model_config(source: ModelSource) -> ModelConfig:
    """The ModelConfig of a resolved checkpoint.

    Raises ConfigError when the folder holds no model or a value is missing or makes no sense; UnsupportedModel when the
    architecture, the rope kind or the quantisation is not built.
    """
    if source.kind == "gguf":
        from zhilight.config.checkpoint_gguf import read_gguf_config

        return read_gguf_config(source.path)
    return config_from_dict(_read_json(source.path, "config.json", required=True),
                            _read_json(source.path, "generation_config.json", required=False))


def config_from_dict(raw: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """A ModelConfig from the keys of config.json and generation_config.json. Errors as `read_model_config`."""
    generation = generation or {}
    architecture = _architecture(raw)
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        raise UnsupportedModel(f"quantisation {method!r} is not built; built are unquantised (bfloat16, float16, float32) "
                               "checkpoints and GGUF files.")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {raw['hidden_act']!r} is not built; built is silu.")
    if raw.get("num_experts"):
        raise UnsupportedModel(f"{architecture} with num_experts {raw['num_experts']} (mixture of experts) is not built.")

    hidden_size, num_heads = _positive(raw, "hidden_size"), _positive(raw, "num_attention_heads")
    num_layers = _positive(raw, "num_hidden_layers")
    num_kv_heads = _positive(raw, "num_key_value_heads", num_heads)
    head_dim = _positive(raw, "head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_attention_heads is {num_heads}, not a multiple of num_key_value_heads ({num_kv_heads}).")
    limit = _positive(raw, "max_position_embeddings", 2048)
    llama_bias = architecture in ("LlamaForCausalLM", "MiniCPMForCausalLM") and bool(raw.get("attention_bias"))
    window, window_layers = _sliding_window(architecture, raw, num_layers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=limit,
        rope=_rope(raw, head_dim),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", architecture == "MiniCPMForCausalLM")),
        qkv_bias=llama_bias or architecture == "Qwen2ForCausalLM",
        output_bias=llama_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(raw.get("mlp_bias")),
        sliding_window=window,
        sliding_window_layers=window_layers,
        **_minicpm_scales(architecture, raw, num_layers, hidden_size),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_token_ids(generation.get("eos_token_id"), raw.get("eos_token_id")),
        generation_defaults={key: generation[key] for key in GENERATION_DEFAULTS if generation.get(key) is not None},
        raw=raw,
    )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or [_BY_MODEL_TYPE.get(raw.get("model_type", ""))]
    for name in names:
        if name in ARCHITECTURES:
            return name
    named = names[0] or f"of model_type {raw.get('model_type')!r}"
    raise UnsupportedModel(f"architecture {named} is not built; built are {', '.join(ARCHITECTURES)}.")


def _rope(raw: dict[str, Any], head_dim: int) -> RopeConfig:
    """`rope_parameters` (transformers 5) holds everything; `rope_scaling` (4) leaves the base to `rope_theta`."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModel(f"rope_parameters by layer type ({', '.join(parameters)}) are not built.")
    kind = parameters.pop("rope_type", None) or parameters.get("type") or "default"
    parameters.pop("type", None)
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in ROPE_KINDS:
        raise UnsupportedModel(f"rope kind {kind!r} is not built; built are {', '.join(ROPE_KINDS)}.")
    theta = parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0
    fraction = parameters.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if raw.get("original_max_position_embeddings") and kind in ("llama3", "yarn", "longrope"):
        parameters["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    rotary_dim = None if fraction == 1.0 else int(head_dim * fraction)
    return RopeConfig(float(theta), kind, parameters, rotary_dim)


def _sliding_window(architecture: str, raw: dict[str, Any], num_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """(window, layers). Defaults where a key is missing are transformers' own."""
    if architecture == "MistralForCausalLM":
        window, layers = raw.get("sliding_window", 4096), None
    elif architecture == "Qwen2ForCausalLM" and raw.get("use_sliding_window"):
        window, layers = raw.get("sliding_window", 4096), tuple(range(raw.get("max_window_layers", 28), num_layers))
    else:
        return None, None
    if types := raw.get("layer_types"):
        layers = tuple(i for i, kind in enumerate(types) if kind == "sliding_attention")
    if not window or layers == ():
        return None, None
    return int(window), layers


def _minicpm_scales(architecture: str, raw: dict[str, Any], num_layers: int, hidden_size: int) -> dict[str, float]:
    if architecture != "MiniCPMForCausalLM":
        return {}
    for key in ("scale_emb", "scale_depth", "dim_model_base"):
        if key not in raw:
            raise ConfigError(f"config.json of a MiniCPM model lacks {key}. Take the file of the original checkpoint.")
    return {"embedding_scale": float(raw["scale_emb"]), "residual_scale": raw["scale_depth"] / math.sqrt(num_layers),
            "logit_scale": raw["dim_model_base"] / hidden_size}


def _token_ids(*values: int | list[int] | None) -> tuple[int, ...]:
    """One tuple, in order and without repeats, of values that are an id, a list of ids or None."""
    ids: dict[int, None] = {}
    for value in values:
        ids.update(dict.fromkeys(value if isinstance(value, list) else [] if value is None else [value]))
    return tuple(ids)


def _positive(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"the model's config has {key} = {value!r}; it must be a positive integer.")
    return value


def _read_json(folder: Path, name: str, required: bool) -> dict[str, Any] | None:
    path = folder / name
    if not path.is_file():
        if not required:
            return None
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise ConfigError(f"{folder} holds no {name} (it holds {found}). Give a folder in Hugging Face format (config.json, "
                          'safetensors, tokenizer.json), a .gguf file, a hub name, or "demo".')
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}). Download it again.") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} holds a {type(document).__name__}, not an object. Download it again.")
    return document
