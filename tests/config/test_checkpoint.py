"""config.json, generation_config.json and GGUF metadata into a ModelConfig; every refusal names what it refuses."""

from __future__ import annotations

import json
import math

import pytest
from gguf_file import write_gguf
from tiny import MODELS

from zhilight.config import checkpoint
from zhilight.config.checkpoint import config_from_dict, read_model_config
from zhilight.config.gguf import read_gguf
from zhilight.errors import CheckpointError, ConfigError, UnsupportedModel
from zhilight.layers.rotary import KINDS
from zhilight.models.registry import ARCHITECTURES
from zhilight.weights.source import ModelSource


def changed(model: str, **keys):
    """The config.json of a tiny model with keys changed; None removes one."""
    raw = MODELS[model] | keys
    return {key: value for key, value in raw.items() if value is not None}


def test_llama():
    config = config_from_dict(MODELS["llama31"], {"eos_token_id": [2, 9], "temperature": 0.6, "top_p": 0.9,
                                                  "do_sample": True})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.num_layers) == (4, 2, 24, 2)
    assert config.rope.kind == "llama3" and config.rope.parameters["factor"] == 8.0
    assert config.qkv_bias and config.output_bias and config.mlp_bias
    assert config.eos_token_ids == (2, 9, 5)
    assert config.generation_defaults == {"temperature": 0.6, "top_p": 0.9}
    assert config.sliding_window is None
    assert config.dtype == "float32"


def test_head_dim_and_kv_heads_have_defaults():
    config = config_from_dict(changed("llama", num_key_value_heads=None))
    assert (config.head_dim, config.num_kv_heads) == (16, 4)


def test_qwen2_windows():
    config = config_from_dict(MODELS["qwen2"])
    assert config.qkv_bias and not config.output_bias and config.tie_word_embeddings
    assert [config.layer_window(i) for i in range(3)] == [None, 8, 8]
    assert config_from_dict(changed("qwen2", use_sliding_window=False)).sliding_window is None
    assert config_from_dict(changed("qwen2", max_window_layers=3)).sliding_window is None
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert config_from_dict(changed("qwen2", layer_types=types)).sliding_window_layers == (0,)


def test_mistral_windows():
    assert config_from_dict(MODELS["mistral"]).layer_window(0) == 8
    assert config_from_dict(MODELS["mistral"] | {"sliding_window": None}).layer_window(0) is None
    assert config_from_dict(changed("mistral", sliding_window=None)).layer_window(0) == 4096


def test_minicpm_scales():
    scales = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    raw = changed("llama", architectures=["MiniCPMForCausalLM"], tie_word_embeddings=None)
    config = config_from_dict(raw | scales)
    assert config.embedding_scale == 12 and config.logit_scale == 0.25 and config.tie_word_embeddings
    assert config.residual_scale == pytest.approx(1.4 / math.sqrt(2))
    with pytest.raises(ConfigError, match="scale_emb"):
        config_from_dict(raw)


@pytest.mark.parametrize(("keys", "kind", "theta"), [
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear", 10000.0),
    ({"rope_scaling": {"type": "su", "short_factor": [], "long_factor": []}}, "longrope", 10000.0),
    ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "default", 5e5),
    ({"rope_scaling": None}, "default", 10000.0),
])
def test_rope_spellings(keys, kind, theta):
    rope = config_from_dict(changed("llama", **keys)).rope
    assert (rope.kind, rope.theta) == (kind, theta)
    assert not {"type", "rope_type", "rope_theta"} & rope.parameters.keys()


def test_max_context_len():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert config_from_dict(changed("llama", rope_scaling=yarn)).max_context_len == 512
    assert config_from_dict(changed("llama", rope_scaling=yarn, max_position_embeddings=512)).max_context_len == 512
    assert config_from_dict(changed("llama", rope_scaling={"type": "dynamic", "factor": 2})).max_context_len == 256
    assert config_from_dict(MODELS["llama31"]).max_context_len == 128


@pytest.mark.parametrize(("keys", "named"), [
    ({"architectures": ["GPT2LMHeadModel"]}, r"GPT2LMHeadModel is not built; built are LlamaForCausalLM, Mistral"),
    ({"architectures": None, "model_type": "gpt2"}, "model_type 'gpt2'"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "rope kind 'spiral' is not built; built are default"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantisation 'gptq'"),
    ({"hidden_act": "gelu"}, "'gelu'"),
    ({"num_experts": 8}, "mixture of experts"),
])
def test_what_is_not_built_is_named(keys, named):
    with pytest.raises(UnsupportedModel, match=named):
        config_from_dict(changed("llama", **keys))


@pytest.mark.parametrize(("keys", "named"), [
    ({"hidden_size": None}, "hidden_size = None"),
    ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
    ({"vocab_size": "128"}, "vocab_size = '128'"),
    ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
])
def test_values_that_make_no_sense(keys, named):
    with pytest.raises(ConfigError, match=named):
        config_from_dict(changed("llama", **keys))


def test_model_type_stands_in_for_architectures():
    assert config_from_dict(changed("qwen2", architectures=None)).architecture == "Qwen2ForCausalLM"


def test_folder(tmp_path):
    source = ModelSource("folder", tmp_path)
    with pytest.raises(ConfigError, match=r"no config.json \(it holds nothing\).*demo"):
        read_model_config(source)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_model_config(source)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="holds a list"):
        read_model_config(source)
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"]))
    assert read_model_config(source).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "top_k": 20}))
    config = read_model_config(source)
    assert config.eos_token_ids == (7, 2) and config.generation_defaults == {"top_k": 20}


def test_the_lists_of_what_is_built_agree():
    assert set(checkpoint.ARCHITECTURES) == set(ARCHITECTURES)
    assert set(checkpoint.ROPE_KINDS) == set(KINDS)


def test_gguf(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", MODELS["llama"])
    config = read_model_config(ModelSource("gguf", path))
    expected = config_from_dict(MODELS["llama"])
    for name in ("architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                 "num_kv_heads", "head_dim", "rms_norm_eps", "rope", "eos_token_ids", "tie_word_embeddings"):
        assert getattr(config, name) == getattr(expected, name), name


@pytest.mark.parametrize(("metadata", "error", "named"), [
    ({"general.architecture": "gemma"}, UnsupportedModel, "'gemma' is not built; built are llama, qwen2"),
    ({"llama.expert_count": 8}, UnsupportedModel, "8 experts"),
    ({"llama.rope.scaling.type": "spiral"}, UnsupportedModel, "'spiral'"),
    ({"llama.rope.dimension_count": 8}, UnsupportedModel, "rotates 8 of 16 values"),
    ({"split.count": 3}, ConfigError, "llama-gguf-split"),
])
def test_gguf_refusals(tmp_path, metadata, error, named):
    path = write_gguf(tmp_path / "tiny.gguf", MODELS["llama"], metadata=metadata)
    with pytest.raises(error, match=named):
        read_model_config(ModelSource("gguf", path))


def test_gguf_yarn_and_frequency_factors(tmp_path):
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32}
    rope = read_model_config(ModelSource("gguf", write_gguf(tmp_path / "a.gguf", MODELS["llama"], metadata=yarn))).rope
    assert rope.kind == "yarn" and rope.parameters == {"factor": 4.0, "original_max_position_embeddings": 32}
    factors = [1.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    path = write_gguf(tmp_path / "b.gguf", MODELS["llama"], rope_factors=factors)
    rope = read_model_config(ModelSource("gguf", path)).rope
    assert rope.kind == "longrope" and rope.parameters["short_factor"] == rope.parameters["long_factor"] == factors
    assert rope.parameters["attention_factor"] == 1.0


@pytest.mark.parametrize(("content", "named"), [
    (b"", "0 bytes"),
    (b"PK\x03\x04" + bytes(40), "magic"),
    (b"GGUF" + (1).to_bytes(4, "little") + bytes(16), "version 1"),
    (b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + (9).to_bytes(8, "little"), "damaged or cut short"),
    (b"GGUF" + (3).to_bytes(4, "little") + (1).to_bytes(8, "little") + (9).to_bytes(8, "little") + b"\xff" * 64, "cut short"),
])
def test_damaged_gguf(tmp_path, content, named):
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=named):
        read_gguf(tmp_path / "bad.gguf")


def test_missing_gguf(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*none\.gguf"):
        read_gguf(tmp_path / "none.gguf")
