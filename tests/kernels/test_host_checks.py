"""What the host functions of norm, rotary and GEMM refuse, and which kernel good arguments launch; without a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zhilight.driver.compiler import LaunchRecorder
from zhilight.driver.dtype import DType, bfloat16, float16, float32, int32, int64
from zhilight.driver.tensor import Tensor
from zhilight.errors import ShapeError
from zhilight.kernels.gemm import gemm
from zhilight.kernels.norm import add_rms_norm
from zhilight.kernels.rotary import rotary_and_cache
from zhilight.kernels.runtime import TensorMaps, map_form


def array(shape: tuple[int, ...], dtype: DType = bfloat16, address: int = 4096,
          given_strides: tuple[int, ...] | None = None) -> Tensor:
    """Of device memory that is never touched."""
    return Tensor(address, shape, dtype, strides=given_strides)


@pytest.fixture
def runtime():
    return SimpleNamespace(capability=(9, 0, "a"), multiprocessors=132, stream=LaunchRecorder(),
                           tensor_maps=TensorMaps(lambda address, form: address), scratch=lambda nbytes: 0,
                           counters=lambda count: 0)


NORM = {"x": array((300, 64)), "residual": array((300, 64)), "weight": array((64,)), "eps": 1e-5, "scale": 1.0,
        "out": array((300, 64))}
ROTARY = {"qkv": array((300, 6 * 64)), "positions": array((300,), int32), "slot_mapping": array((300,), int64),
          "cos_sin": array((99, 64), float32), "kv_cache": array((9, 2, 1, 64, 64)), "num_heads": 4, "num_kv_heads": 1}
GEMM = {"x": array((300, 64)), "weight": array((96, 64)), "out": array((300, 96)), "bias": array((96,))}

REFUSED = [
    (add_rms_norm, NORM, "x", array((300, 60)), "multiples of 8"),
    (add_rms_norm, NORM, "weight", array((64,), float32), "weight is float32"),
    (add_rms_norm, NORM, "residual", array((299, 64)), r"residual is bfloat16 \(299, 64\)"),
    (add_rms_norm, NORM, "residual", array((300, 64), given_strides=(72, 1)), "contiguous"),
    (add_rms_norm, NORM, "out", array((300, 64), float16), "out is float16"),
    (rotary_and_cache, ROTARY, "qkv", array((300, 5 * 64)), "qkv is"),
    (rotary_and_cache, ROTARY, "kv_cache", array((9, 2, 1, 64, 64), float16), "kv_cache is float16"),
    (rotary_and_cache, ROTARY, "cos_sin", array((99, 24), float32), "cos_sin has 24 columns"),
    (rotary_and_cache, ROTARY, "slot_mapping", array((300,), int32), "slot_mapping and cos_sin are .*int32, int32, float32"),
    *[(gemm, GEMM, name, value, message) for name, value, message in [
        ("x", array((300, 64), float32), "both must be bfloat16"),
        ("x", array((300,)), r"must be \[M, K\]"),
        ("weight", array((96, 72)), "weight is"),
        ("weight", array((92, 64)), "N is 92"),
        ("out", array((300, 95)), "out is"),
        ("out", array((300, 96), int32), "out is int32"),
        ("bias", array((95,)), r"bias is \[95\]"),
        ("bias", array((96,), float32), "bias is .*float32"),
    ]],
    *[(gemm, GEMM | {"x": array((m, 64)), "out": array((m, 96), address=address)}, name, value, message)
      for m, address in ((64, 4096), (8, 4100)) for name, value, message in [  # gemm_swapped, gemm_small
          ("x", array((m, 64), address=4100), "multiples of 16 bytes"),
          ("weight", array((96, 72)), r"must be \[M, K\]"),
          ("weight", array((96, 64), given_strides=(72, 1)), "weight has strides"),
          ("bias", array((95,)), "bias is"),
      ]],
]


@pytest.mark.parametrize(("function", "good", "name", "value", "message"), REFUSED)
def test_bad_arguments_are_named_each_time(runtime, function, good, name, value, message):
    """Equal layouts are checked once: a refusal must not be remembered as a pass, nor a pass serve another layout."""
    function(runtime, **good)
    for _ in range(2):
        with pytest.raises(ShapeError, match=message):
            function(runtime, **(good | {name: value}))
    assert len(runtime.stream.kernels) == 1


@pytest.mark.parametrize(("capability", "m", "address", "factory"), [
    ((9, 0, "a"), 300, 4096, "gemm_sm90_kernel"), ((9, 0, "a"), 64, 4096, "gemm_swapped_kernel"),
    ((9, 0, "a"), 8, 4100, "gemm_small_kernel"), ((8, 0, ""), 8, 4096, "gemm_small_kernel"),
    ((8, 0, ""), 300, 4096, "gemm_sm80_kernel")])
def test_the_kernel_fits_the_layout(runtime, capability, m, address, factory):
    runtime.capability = capability
    gemm(runtime, **(GEMM | {"x": array((m, 64)), "out": array((m, 96), address=address)}))
    assert [kernel.call.factory for kernel in runtime.stream.kernels] == [factory]


def test_equal_maps_have_one_form():
    assert map_form(bfloat16, (4, 8), (16,), (2, 8)) is map_form(bfloat16, (4, 8), (16,), (2, 8))
    assert map_form(bfloat16, (4, 8), (16,), (2, 8)) is not map_form(float16, (4, 8), (16,), (2, 8))


def test_a_map_is_made_once():
    made = []
    maps = TensorMaps(lambda address, form: made.append((address, form)) or 128 * len(made))
    forms = map_form(bfloat16, (4, 8), (16,), (2, 8)), map_form(bfloat16, (5, 8), (16,), (2, 8))
    assert [maps[4096, forms[0]], maps[4096, forms[1]], maps[8192, forms[0]], maps[4096, forms[0]]] == [128, 256, 384, 128]
    assert made == [(4096, forms[0]), (4096, forms[1]), (8192, forms[0])]
