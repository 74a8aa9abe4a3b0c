"""Every rope kind against cosines and sines made with transformers (tests/golden/make_golden.py)."""

from __future__ import annotations

import numpy as np
import pytest
from forward import GOLDEN
from tiny import ROPE_HEAD_DIM, ROPE_MAX_POSITIONS, ROPES

from zhilight.config.model import RopeConfig
from zhilight.errors import ConfigError, UnsupportedModel
from zhilight.layers.rotary import rope_table


def table(name: str, positions: int) -> np.ndarray:
    parameters = dict(ROPES[name])
    rope = RopeConfig(10000.0, parameters.pop("rope_type"), parameters)
    return rope_table(rope, ROPE_HEAD_DIM, positions, ROPE_MAX_POSITIONS.get(name, 256))


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("positions", [64, 256])
def test_golden(name, positions):
    golden = np.load(GOLDEN / "ropes.npz")[f"{name}_{positions}"]
    result = table(name, positions)
    assert result.dtype == np.float32 and result.shape == (positions, ROPE_HEAD_DIM)
    np.testing.assert_allclose(result[::3], golden, atol=4e-5)      # angles reach 256: half a unit of float32 is 1.5e-5


def test_kinds_differ():
    """No kind falls back to plain rotation: each table differs from the default one."""
    plain = table("default", 256)
    for name in ROPES:
        if name != "default":
            assert np.abs(table(name, 256) - plain).max() > 0.1, name


def test_dynamic_follows_the_configured_length():
    assert (table("dynamic", 64) == table("default", 64)).all()
    assert np.abs(table("dynamic", 256)[:64] - table("default", 64)).max() > 0.1


def test_longrope_chooses_its_factors_by_the_configured_length():
    assert np.abs(table("longrope", 65)[:64] - table("longrope", 64)).max() > 0.1


def test_partial_rotation():
    rope = RopeConfig(10000.0, rotary_dim=8)
    result = rope_table(rope, 32, 10, 256)
    assert result.shape == (10, 8)
    np.testing.assert_allclose(result[3, :4], np.cos(3 * 10000.0 ** -(np.arange(4) / 4)), atol=1e-6)


def test_unknown_kind_is_named():
    with pytest.raises(UnsupportedModel, match=r"'spiral'.*default, linear, dynamic, llama3, yarn, longrope"):
        rope_table(RopeConfig(kind="spiral"), 32, 10, 256)


def test_missing_parameter_is_named():
    with pytest.raises(ConfigError, match="'factor'"):
        rope_table(RopeConfig(kind="linear"), 32, 10, 256)
    with pytest.raises(ConfigError, match="long_factor has 3 values; a head rotates 16 pairs"):
        rope_table(RopeConfig(kind="longrope", parameters={"long_factor": [1, 1, 1],
                                                           "original_max_position_embeddings": 4}), 32, 10, 256)
