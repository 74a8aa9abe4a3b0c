"""Tiny random models against logits made with transformers (tests/golden/make_golden.py), whole and in pieces."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from forward import GOLDEN, Sequence, save_folder
from tiny import MODELS, tiny_weights, token_ids

from zhilight.config.checkpoint import config_from_dict, read_model_config
from zhilight.config.engine import EngineConfig
from zhilight.config.model import ModelConfig, RopeConfig
from zhilight.errors import UnsupportedModel
from zhilight.models.model import Model
from zhilight.models.registry import build_model
from zhilight.ops.base import StepArrays
from zhilight.ops.cpu import CpuOps
from zhilight.weights.loader import load_model
from zhilight.weights.source import ModelSource


def load(folder: Path, config: dict, weights: dict, ops: CpuOps | None = None) -> Model:
    save_folder(folder, config, weights)
    source = ModelSource("folder", folder)
    return load_model(EngineConfig(model=str(folder)), read_model_config(source), source, ops or CpuOps(poison=True),
                      progress=False)


class AddingOps(CpuOps):
    """A backend whose products add to the residual as they store, as the GPU's do for many rows."""

    def linear_add(self, x, weight, residual, bias=None, out=None):
        residual += self.linear(x, weight, bias)


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture
def model(name, tmp_path) -> Model:
    return load(tmp_path, MODELS[name], tiny_weights(MODELS[name]))


@pytest.fixture
def golden(name) -> np.ndarray:
    return np.load(GOLDEN / "models.npz")[name]


def test_prefill(model, golden):
    logits = Sequence(model.ops, model, 48).logits(token_ids().tolist())
    np.testing.assert_allclose(logits, golden, atol=1e-4)


def test_chunks_then_decode(model, golden):
    ids, sequence = token_ids().tolist(), Sequence(model.ops, model, 48)
    pieces = [sequence.logits(ids[start:end]) for start, end in ((0, 17), (17, 18), (18, 35))]
    pieces += [sequence.logits([token]) for token in ids[35:]]
    np.testing.assert_allclose(np.concatenate(pieces), golden, atol=1e-4)


def test_products_that_add_to_the_residual(name, tmp_path, golden):
    model = load(tmp_path, MODELS[name], tiny_weights(MODELS[name]), AddingOps(poison=True))
    ids, sequence = token_ids().tolist(), Sequence(model.ops, model, 48)
    pieces = [sequence.logits(ids[:20]), sequence.logits(ids[20:33], last_only=True), sequence.logits(ids[33:])]
    np.testing.assert_allclose(np.concatenate(pieces), golden[[*range(20), 32, *range(33, len(ids))]], atol=1e-4)


def test_sequences_of_a_batch_do_not_mix(model, golden):
    """Two decode sequences and a prefill of other tokens in one step give what they give alone."""
    ids, ops, config = token_ids(), model.ops, model.config
    cache = ops.kv_cache(config.num_layers, 13, config.num_kv_heads, 16, config.head_dim)

    def step(sequences, num_decodes):
        """sequences: (first block, tokens, position of the first)."""
        positions = [np.arange(first, first + len(tokens)) for _, tokens, first in sequences]
        slots = [block * 16 + position for (block, _, _), position in zip(sequences, positions, strict=True)]
        lengths = [len(tokens) for _, tokens, _ in sequences]
        return ops.prepare_step(StepArrays(
            token_ids=np.concatenate([tokens for _, tokens, _ in sequences]), positions=np.concatenate(positions),
            slot_mapping=np.concatenate(slots), block_tables=np.array([[b, b + 1, b + 2] for b, _, _ in sequences]),
            context_lens=np.array([p[-1] + 1 for p in positions]), query_start=np.cumsum([0, *lengths]),
            logit_rows=np.cumsum(lengths) - 1, num_decodes=num_decodes))

    with ops.scope():
        model(step([(1, ids[:30], 0), (4, ids[:12], 0)], 0), cache)
    with ops.scope():
        logits = model(step([(1, ids[30:31], 30), (4, ids[12:13], 12), (7, ids[:21], 0)], 2), cache).copy()
    np.testing.assert_allclose(logits, golden[[30, 12, 20]], atol=1e-4)


@pytest.mark.parametrize("rows", [range(48), [47], [3, 46, 0], []], ids=["all", "last", "some", "none"])
def test_hidden_states_feed_the_head(model, golden, rows):
    ids, sequence = token_ids().tolist(), Sequence(model.ops, model, 48)
    rows = [row for row in rows if row < len(ids)] if len(rows) != 1 else [len(ids) - 1]
    with model.ops.scope():
        hidden = model.hidden_states(sequence.step(ids, rows), sequence.kv_cache)
        assert hidden.shape == (len(rows), model.config.hidden_size)
        np.testing.assert_allclose(hidden @ model.head.weight.array.T, golden[rows], atol=1e-4)


def test_a_step_that_wants_no_logits_still_fills_the_cache(model, golden):
    ids, sequence = token_ids().tolist(), Sequence(model.ops, model, 48)
    with model.ops.scope():
        assert model(sequence.step(ids[:20], []), sequence.kv_cache).shape == (0, model.config.vocab_size)
    np.testing.assert_allclose(sequence.logits(ids[20:]), golden[20:], atol=1e-4)


def test_minicpm_is_an_exact_re_expression_of_llama(tmp_path):
    """Powers of two in the three scales, and their inverses in the weights, leave every rounding as it was."""
    config, weights = MODELS["llama"], tiny_weights(MODELS["llama"])
    embedding, residual, head = 16.0, 0.25, 4.0
    changed = dict(weights)
    for tensor, weight in weights.items():
        if tensor == "model.embed_tokens.weight":
            changed[tensor] = weight / embedding
        elif tensor.endswith(("o_proj.weight", "down_proj.weight")):
            changed[tensor] = weight / residual
        elif tensor == "lm_head.weight":
            changed[tensor] = weight * head
    minicpm = config | {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "scale_emb": embedding,
                        "scale_depth": residual * math.sqrt(config["num_hidden_layers"]),
                        "dim_model_base": int(config["hidden_size"] / head)}
    ids = token_ids().tolist()
    llama = load(tmp_path / "llama", config, weights)
    other = load(tmp_path / "minicpm", minicpm, changed)
    assert (Sequence(other.ops, other, 48).logits(ids) == Sequence(llama.ops, llama, 48).logits(ids)).all()


def test_layers_share_their_workspace(tmp_path):
    """The workspace of a step does not grow with the number of layers."""
    sizes = []
    for layers in (2, 12):
        config = MODELS["llama"] | {"num_hidden_layers": layers, "intermediate_size": 4096, "max_position_embeddings": 1024}
        model = load(tmp_path / str(layers), config, tiny_weights(config))
        sequence = Sequence(model.ops, model, 1024)
        sequence.logits(token_ids().tolist() * 25, last_only=True)
        sizes.append(sum(chunk.nbytes for chunk in model.ops._workspace._chunks))
    assert sizes[0] == sizes[1] > 30e6      # more than the arena's first chunk, so that growth would show


def test_unknown_architecture_is_named():
    config = ModelConfig("GPT2LMHeadModel", 8, 8, 8, 1, 1, 1, 8, 1e-5, 8, RopeConfig())
    with pytest.raises(UnsupportedModel, match=r"'GPT2LMHeadModel' is not built; built are LlamaForCausalLM"):
        build_model(config)


def test_the_rotary_table_follows_max_model_len():
    config = config_from_dict(MODELS["llama"])
    for length, expected in ((None, 128), (50, 50)):
        model = build_model(config, length)
        assert model.layers[0].attention.rotary.cos_sin.make().shape == (expected, 16)
        assert model.layers[0].attention.rotary is model.layers[1].attention.rotary
