"""The CPU backend's dense operations against float64 formulas written out independently."""

from __future__ import annotations

import numpy as np
import pytest

from zhilight.errors import ShapeError
from zhilight.ops.base import StepArrays
from zhilight.ops.cpu import CpuOps


@pytest.fixture
def ops() -> CpuOps:
    return CpuOps(poison=True)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float = 2e-5) -> None:
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear(ops, rng, tokens, with_bias):
    x, weight, bias = normal(rng, tokens, 48), normal(rng, 33, 48), normal(rng, 33) if with_bias else None
    expected = x.astype(np.float64) @ weight.astype(np.float64).T + (bias if with_bias else 0)
    close(ops.linear(x, weight, bias), expected)
    out = np.empty((tokens, 33), np.float32)
    assert ops.linear(x, weight, bias, out=out) is out
    close(out, expected)


def test_linear_takes_strided_rows(ops, rng):
    wide, weight = normal(rng, 5, 100), normal(rng, 8, 40)
    close(ops.linear(wide[:, 10:50], weight), wide[:, 10:50].astype(np.float64) @ weight.T)


def test_linear_silu_mul_is_interleaved(ops, rng):
    x, gate, up = normal(rng, 6, 32), normal(rng, 10, 32), normal(rng, 10, 32)
    bias = normal(rng, 20)
    weight = np.stack((gate, up), axis=1).reshape(20, 32)
    expected = (silu(x.astype(np.float64) @ gate.T + bias[0::2]) * (x.astype(np.float64) @ up.T + bias[1::2]))
    close(ops.linear_silu_mul(x, weight, bias), expected)


def test_silu_of_extreme_gates_is_finite(ops):
    gates = np.array([-200, -90, -1, 0, 90], np.float32)
    result = ops.silu_mul(np.stack((gates, np.full(5, 2, np.float32)), axis=1).reshape(1, 10))
    close(result[0], 2 * silu(gates.astype(np.float64)))


def test_logits_are_scaled(ops, rng):
    x, weight = normal(rng, 3, 16), normal(rng, 50, 16)
    close(ops.logits(x, weight, 0.25), 0.25 * (x.astype(np.float64) @ weight.T))


def test_embedding(ops, rng):
    table, ids = normal(rng, 20, 8), np.array([3, 19, 0, 3], np.int32)
    close(ops.embedding(ids, table, 12.0), 12 * table[ids].astype(np.float64))


@pytest.mark.parametrize("bad", [-1, 20])
def test_embedding_refuses_ids_outside_the_vocabulary(ops, rng, bad):
    with pytest.raises(ShapeError, match="token_ids"):
        ops.embedding(np.array([0, bad], np.int32), normal(rng, 20, 8))


def test_rms_norm(ops, rng):
    x, weight = 30 * normal(rng, 4, 64), normal(rng, 64)
    wide = x.astype(np.float64)
    close(ops.rms_norm(x, weight, 1e-5), wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight)


def test_rms_norm_of_tiny_values_is_ruled_by_eps(ops):
    close(ops.rms_norm(np.full((1, 4), 1e-6, np.float32), np.ones(4, np.float32), 1e-2), np.full((1, 4), 1e-5), 1e-9)


@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_add_rms_norm_updates_the_residual(ops, rng, scale):
    x, residual, weight = normal(rng, 4, 64), normal(rng, 4, 64), normal(rng, 64)
    total = residual.astype(np.float64) + scale * x.astype(np.float64)
    result = ops.add_rms_norm(x, residual, weight, 1e-6, scale)
    close(residual, total)
    close(result, total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-6) * weight)


def test_gather_rows(ops, rng):
    x = normal(rng, 5, 8)
    assert ops.gather_rows(x, np.array([4, 0, 4], np.int32)).tolist() == x[[4, 0, 4]].tolist()
    assert ops.gather_rows(x, np.empty(0, np.int32)).shape == (0, 8)


@pytest.mark.parametrize(("name", "call"), [
    ("x", lambda ops, a: ops.linear(a, np.ones((3, 5), np.float32))),
    ("bias", lambda ops, a: ops.linear(a, np.ones((3, 4), np.float32), bias=np.ones(2, np.float32))),
    ("out", lambda ops, a: ops.linear(a, np.ones((3, 4), np.float32), out=np.empty((2, 2), np.float32))),
    ("weight", lambda ops, a: ops.rms_norm(a, np.ones(3, np.float32), 1e-5)),
    ("residual", lambda ops, a: ops.add_rms_norm(a, np.ones((2, 3), np.float32), np.ones(4, np.float32), 1e-5)),
    ("upload", lambda ops, a: ops.upload(a, np.ones((4, 2), np.float32))),
    ("silu_mul", lambda ops, a: ops.silu_mul(a[:, :3])),
])
def test_wrong_shapes_name_the_argument(ops, name, call):
    with pytest.raises(ShapeError, match=name):
        call(ops, np.ones((2, 4), np.float32))


def test_upload_converts_and_fills_strided_views(ops, rng):
    import ml_dtypes

    target, values = ops.parameter((6, 4)), normal(rng, 3, 4).astype(ml_dtypes.bfloat16)
    target[:] = 0
    ops.upload(target[1::2], values)
    assert target[1::2].tolist() == values.astype(np.float32).tolist()
    assert not target[0::2].any()


def test_fill_random_covers_large_parameters_with_the_scale_asked_for(ops):
    target = ops.parameter((1500, 2000))
    target[:] = np.nan
    ops.fill_random(target, 0.5, seed=3, mean=1.0)
    assert abs(target.mean() - 1) < 0.01 and abs(target.std() - 0.5) < 0.01
    again = ops.parameter((1500, 2000))
    ops.fill_random(again, 0.5, seed=3, mean=1.0)
    assert (again == target).all()


def test_workspace_is_stable_and_scopes_nest(ops):
    addresses = []
    for _ in range(3):
        with ops.scope():
            first = ops.empty((100, 7))
            with ops.scope():
                inner = ops.empty((50,))
            second = ops.empty((50,))
            assert second.ctypes.data == inner.ctypes.data
            assert not np.shares_memory(first, second)
            large = ops.empty((5_000_000,))
            large[:] = 1
        addresses.append((first.ctypes.data, second.ctypes.data, large.ctypes.data))
    assert addresses[1] == addresses[2]


def test_workspace_is_poisoned_after_its_scope(ops):
    with ops.scope():
        array = ops.empty((4,))
        array[:] = 1
    assert np.isnan(array).all()


def test_prepare_step_feeds_sampled_tokens(ops):
    arrays = StepArrays(
        token_ids=np.array([-1, 11, -1], np.int32), positions=np.array([4, 5, 6]), slot_mapping=np.array([4, 5, 6]),
        block_tables=np.zeros((3, 1)), context_lens=np.array([5, 6, 7]), query_start=np.array([0, 1, 2, 3]),
        logit_rows=np.array([0, 1, 2]), num_decodes=3, feed_rows=np.array([0, 2]), feed_sources=np.array([5, 1]))
    step = ops.prepare_step(arrays, np.array([90, 91, 92, 93, 94, 95], np.int32))
    assert step.token_ids.tolist() == [95, 11, 91]
    assert (step.num_tokens, step.num_sequences, step.max_context_len) == (3, 3, 7)
    assert arrays.token_ids.tolist() == [-1, 11, -1]
    with pytest.raises(ShapeError, match="feed_rows"):
        ops.prepare_step(arrays)


def test_fetch_is_a_copy_of_the_moment(ops):
    array = np.arange(3)
    fetch = ops.fetch(array)
    array[:] = 9
    assert fetch.ready() and fetch.wait().tolist() == [0, 1, 2]
