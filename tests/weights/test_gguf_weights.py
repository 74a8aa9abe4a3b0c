"""GGUF weights: names, the order of q and k rows, every quantisation, tied tables stored twice."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from forward import Sequence
from gguf_file import permute, write_gguf
from tiny import MODELS, tiny_weights, token_ids

from zhilight.config.checkpoint import read_model_config
from zhilight.config.engine import EngineConfig
from zhilight.config.gguf import read_gguf
from zhilight.errors import CheckpointError
from zhilight.models.model import Model
from zhilight.ops.cpu import CpuOps
from zhilight.weights import gguf as gguf_weights
from zhilight.weights.loader import load_model
from zhilight.weights.source import ModelSource


def load(path: Path) -> Model:
    source = ModelSource("gguf", path)
    return load_model(EngineConfig(model=str(path)), read_model_config(source), source, CpuOps(), progress=False)


def bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


def part(model: Model, name: str) -> np.ndarray:
    return next(parameter.view(part) for parameter in model.parameters() for part in parameter.parts if part.name == name)


@pytest.mark.parametrize("name", ["llama", "qwen2", "llama31"])
@pytest.mark.parametrize("block", [64 * 24, 1 << 20])
def test_every_tensor_arrives_rounded_to_bf16(tmp_path, name, block, monkeypatch):
    monkeypatch.setattr(gguf_weights, "_BLOCK_ELEMENTS", block)
    config = MODELS[name] if name != "llama31" else MODELS[name] | {"mlp_bias": False, "eos_token_id": 2}
    if name == "llama31":     # the biases of a llama's q and k are permuted too; its o_proj has one
        config = config | {"rope_scaling": None}
    model = load(write_gguf(tmp_path / "tiny.gguf", config))
    for tensor, expected in tiny_weights(config).items():
        assert (part(model, tensor) == bf16(expected)).all(), tensor


QUANTS = ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
"""What the gguf package can write; it reads further types, which test_types_that_are_only_read covers."""


@pytest.mark.parametrize("quant", QUANTS)
def test_quantised_matrices(tmp_path, quant):
    config = MODELS["llama"]
    kind = gguf.GGMLQuantizationType[quant]
    model = load(write_gguf(tmp_path / "tiny.gguf", config, quant=lambda name: quant))
    for tensor, weight in tiny_weights(config).items():
        expected = weight
        if weight.ndim == 2:
            expected = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        assert (part(model, tensor) == bf16(expected)).all(), tensor


@pytest.mark.parametrize("quant", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0"])
def test_types_that_are_only_read(tmp_path, quant):
    """Rows of random bytes in each type: the reader cuts the file at the right bytes for every block size."""
    kind = gguf.GGMLQuantizationType[quant]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (6, 2 * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "raw.gguf", "llama")
    writer.add_tensor("first", np.ones(7, np.float32))
    writer.add_tensor("raw", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "raw.gguf")
    assert file.tensors["raw"].shape == (6, 2 * block)
    np.testing.assert_array_equal(file.rows("raw", 2, 5), gguf.quants.dequantize(raw[2:5], kind))
    assert file.rows("first").tolist() == [1] * 7


def test_permutation_is_undone():
    rows = np.arange(24 * 3).reshape(24, 3)
    assert (gguf_weights.unpermute(permute(rows, 3), 8) == rows).all()


def test_logits_equal_those_of_the_safetensors_folder(tmp_path):
    from forward import save_folder

    config = MODELS["llama"]
    save_folder(tmp_path / "folder", config, {name: bf16(weight) for name, weight in tiny_weights(config).items()})
    source = ModelSource("folder", tmp_path / "folder")
    model = load_model(EngineConfig(model="x"), read_model_config(source), source, CpuOps(), progress=False)
    other = load(write_gguf(tmp_path / "tiny.gguf", config))
    ids = token_ids().tolist()
    expected = Sequence(model.ops, model, 48).logits(ids)
    np.testing.assert_array_equal(Sequence(other.ops, other, 48).logits(ids), expected)


def test_a_tied_table_stored_twice_is_read_from_output(tmp_path):
    config = MODELS["qwen2"]
    embed = tiny_weights(config)["model.embed_tokens.weight"]
    fine = bf16(embed)
    path = write_gguf(tmp_path / "tiny.gguf", config, quant=lambda name: "Q4_0" if "embed" in name else "F32",
                      extra={"output.weight": fine})
    source = ModelSource("gguf", path)
    assert read_model_config(source).tie_word_embeddings
    assert (part(load(path), "model.embed_tokens.weight") == fine).all()


def test_two_different_tables_are_not_tied(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", MODELS["llama"])
    assert not read_model_config(ModelSource("gguf", path)).tie_word_embeddings


def test_unknown_tensors_are_named(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", MODELS["llama"], extra={"blk.0.attn_sinks.weight": np.ones(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"1 tensors unknown: blk\.0\.attn_sinks\.weight"):
        load(path)


def test_a_file_cut_short_is_named(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", MODELS["llama"])
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="cut short"):
        load(path)


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path):
    extra = {"token_embd.weight": np.zeros((4, 64), np.int32)}
    writer = gguf.GGUFWriter(tmp_path / "raw.gguf", "llama")
    writer.add_tensor("ids", extra["token_embd.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="ids has type I32"):
        read_gguf(tmp_path / "raw.gguf").rows("ids")
