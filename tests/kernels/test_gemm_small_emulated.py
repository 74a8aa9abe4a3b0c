"""gemm_small's own Python function, thread by thread without a GPU, against NumPy: rings, row groups, ragged sizes."""

from __future__ import annotations

import numpy as np
import pytest
from emulation import Emulator

from zhilight.driver.dtype import bfloat16, float32
from zhilight.kernels import gemm_small as module

BF16 = bfloat16.numpy


@pytest.mark.parametrize("case", [
    {"m": 1, "n": 40, "k": 264, "rows": 20, "row_tiles": 2},
    {"m": 3, "n": 80, "k": 1032, "rows": 72, "row_tiles": 4, "bias": True},
    {"m": 11, "n": 40, "k": 1040, "rows": 34, "token_tiles": 2, "row_tiles": 2, "bias": True, "silu_mul": True},
    {"m": 20, "n": 24, "k": 520, "rows": 24, "token_tiles": 4, "row_tiles": 2, "k_tile": 64, "stages": 5, "wide": True},
], ids=lambda case: "-".join(map(str, list(case.values())[:3])))
def test_against_numpy(monkeypatch, case):
    m, n, k, rows = (case[name] for name in ("m", "n", "k", "rows"))
    bias, silu_mul, wide = (case.get(name, False) for name in ("bias", "silu_mul", "wide"))
    emulator, rng = Emulator(), np.random.default_rng(n + k)
    emulator.install(monkeypatch, module)

    x, weight, values = (rng.standard_normal(shape).astype(BF16) for shape in ((m, k), (n, k), n))
    width = n // 2 if silu_mul else n
    out = np.full((m, width + 3), 7, np.float32 if wide else BF16)  # NaN would hide a stray write of what was never set
    kernel = module.gemm_small_kernel(
        bfloat16, float32 if wide else bfloat16, case.get("token_tiles", 1), case["row_tiles"], bias, silu_mul, True,
        k_tile=case.get("k_tile", 128), stages=case.get("stages", 6))
    tensors = [emulator.tensor(array) for array in (x, weight, values, out)]
    emulator.launch(kernel, -(-n // rows), *tensors, m, n, k, k, width + 3, rows, 0.5 if wide else 1.0)

    want = x.astype(np.float64) @ weight.astype(np.float64).T + (values.astype(np.float64) if bias else 0.0)
    if wide:
        want *= 0.5
    if silu_mul:
        want = want[:, 0::2] / (1 + np.exp(-want[:, 0::2])) * want[:, 1::2]
    got = emulator.array(tensors[3]).astype(np.float64)
    assert (got[:, width:] == 7).all(), "wrote beyond the row"
    error = np.linalg.norm(got[:, :width] - want) / np.linalg.norm(want)
    assert error < (1e-6 if wide else 3e-3), f"relative error {error:.2e}"
