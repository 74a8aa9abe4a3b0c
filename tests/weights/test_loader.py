"""The weight loader: what it refuses, by name, what it fills, and how much host memory it takes."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from forward import save_folder
from safetensors.numpy import save_file
from tiny import MODELS, tiny_weights

from zhilight.config.checkpoint import config_from_dict
from zhilight.config.engine import EngineConfig
from zhilight.errors import CheckpointError, ConfigError
from zhilight.models.model import Model
from zhilight.ops.cpu import CpuOps
from zhilight.weights import safetensors
from zhilight.weights.loader import load_model
from zhilight.weights.source import ModelSource


def load(folder: Path, config: dict, **settings) -> Model:
    return load_model(EngineConfig(model=str(folder), **settings), config_from_dict(config), ModelSource("folder", folder),
                      CpuOps(), progress=False)


def part(model: Model, name: str) -> np.ndarray:
    return next(parameter.view(part) for parameter in model.parameters() for part in parameter.parts if part.name == name)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("shards", "block_bytes"), [(1, 64 << 20), (3, 1000)])
def test_every_tensor_arrives(tmp_path, name, shards, block_bytes, monkeypatch):
    monkeypatch.setattr(safetensors, "_BLOCK_BYTES", block_bytes)
    weights = tiny_weights(MODELS[name])
    save_folder(tmp_path, MODELS[name], weights, shards)
    model = load(tmp_path, MODELS[name])
    for tensor, expected in weights.items():
        assert (part(model, tensor) == expected).all(), tensor


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_floating_types_are_converted(tmp_path, dtype):
    import ml_dtypes

    stored = np.dtype(getattr(ml_dtypes, dtype, dtype))
    weights = {name: values.astype(stored) for name, values in tiny_weights(MODELS["llama"]).items()}
    save_folder(tmp_path, MODELS["llama"], weights)
    model = load(tmp_path, MODELS["llama"])
    for tensor, expected in weights.items():
        assert (part(model, tensor) == expected.astype(np.float32)).all(), tensor


def test_missing_unknown_and_misshapen_tensors_are_all_named(tmp_path):
    weights = tiny_weights(MODELS["llama"])
    del weights["model.layers.1.self_attn.k_proj.weight"]
    weights["model.layers.1.self_attn.z_proj.weight"] = np.zeros((2, 2), np.float32)
    weights["model.norm.weight"] = np.zeros(63, np.float32)
    weights["lm_head.weight"] = weights["lm_head.weight"].astype(np.int8)
    save_folder(tmp_path, MODELS["llama"], weights)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path, MODELS["llama"])
    message = str(error.value)
    assert "1 tensors missing: model.layers.1.self_attn.k_proj.weight" in message
    assert "1 tensors unknown: model.layers.1.self_attn.z_proj.weight" in message
    assert "model.norm.weight is [63], expected [64]" in message
    assert "lm_head.weight has dtype I8" in message


def test_long_lists_are_cut(tmp_path):
    save_folder(tmp_path, MODELS["llama"], {"model.norm.weight": np.zeros(64, np.float32)})
    with pytest.raises(CheckpointError, match=r"20 tensors missing: .* and 10 more"):
        load(tmp_path, MODELS["llama"])


def test_known_harmless_tensors_are_ignored(tmp_path):
    weights = tiny_weights(MODELS["qwen2"])
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]      # tied, and stored a second time
    save_folder(tmp_path, MODELS["qwen2"], weights)
    load(tmp_path, MODELS["qwen2"])


def test_a_head_is_not_ignored_when_it_is_not_tied(tmp_path):
    config = MODELS["llama"] | {"tie_word_embeddings": True}
    save_folder(tmp_path, config, tiny_weights(config))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load(tmp_path, MODELS["llama"])


def test_pickles_are_refused_with_a_hint(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_pretrained.*safetensors"):
        load(tmp_path, MODELS["llama"])


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors file.*load_format=dummy"):
        load(tmp_path, MODELS["llama"])


def test_a_missing_shard_is_named(tmp_path):
    save_folder(tmp_path, MODELS["llama"], tiny_weights(MODELS["llama"]), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 3 files.*model-00002-of-00003"):
        load(tmp_path, MODELS["llama"])


@pytest.mark.parametrize("damage", ["cut", "not json", "long header", "empty", "wrong size"])
def test_damaged_files_are_named(tmp_path, damage):
    save_folder(tmp_path, MODELS["llama"], tiny_weights(MODELS["llama"]))
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    if damage == "wrong size":
        header = {"model.norm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 128]}}
        packed = json.dumps(header).encode()
        data = struct.pack("<Q", len(packed)) + packed + bytes(128)
    file.write_bytes({"cut": data[:-100], "not json": data[:8] + b"?" + data[9:], "empty": b"",
                      "long header": struct.pack("<Q", 1 << 40) + data[8:], "wrong size": data}[damage])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        load(tmp_path, MODELS["llama"])


def test_load_format_must_fit_the_files(tmp_path):
    with pytest.raises(ConfigError, match=r"load_format is 'gguf' but .* is safetensors"):
        load(tmp_path, MODELS["llama"], load_format="gguf")


def test_dummy_weights_give_sensible_logits(tmp_path):
    from forward import Sequence

    model = load(tmp_path, MODELS["llama"] | {"vocab_size": 1000}, load_format="dummy")
    logits = Sequence(model.ops, model, 32).logits(list(range(20)))
    assert np.isfinite(logits).all() and 0.3 < logits.std() < 3


PEAK_SCRIPT = """
import resource, sys
from pathlib import Path
from zhilight.config.checkpoint import read_model_config
from zhilight.config.engine import EngineConfig
from zhilight.ops.cpu import CpuOps
from zhilight.weights.loader import load_model
from zhilight.weights.source import ModelSource
import ml_dtypes, tqdm
source = ModelSource("folder", Path(sys.argv[1]))
config = read_model_config(source)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_model(EngineConfig(model=sys.argv[1]), config, source, CpuOps())
weights = sum(parameter.array.nbytes for parameter in model.parameters())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 - weights)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss counts mapped pages on Linux only")
def test_host_memory_stays_below_one_shard(tmp_path):
    """Four shards of 32 MB: beside the weights themselves, loading takes less than one shard."""
    import ml_dtypes

    config = MODELS["llama"] | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 32768,
                                "head_dim": 32, "num_attention_heads": 16, "num_key_value_heads": 16}
    rng, zeros = np.random.default_rng(0), {}
    for name, weight in tiny_weights(MODELS["llama"] | {"num_hidden_layers": 8}).items():
        sizes = {64: 512, 32: 512, 96: 2048, 128: 32768}
        shape = tuple(sizes[size] for size in weight.shape)
        zeros[name] = rng.integers(0, 1 << 14, shape, np.uint16).view(ml_dtypes.bfloat16)
    names = list(zeros)
    (tmp_path / "config.json").write_text(json.dumps(config))
    for shard in range(4):
        save_file({name: zeros[name] for name in names[shard::4]}, tmp_path / f"model-{shard}.safetensors")
    shard_bytes = max(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    total = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert total > 100 << 20
    run = subprocess.run([sys.executable, "-c", PEAK_SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(run.stdout) < shard_bytes, f"{int(run.stdout) / 1e6:.0f} MB beside the weights"
