"""Every kernel module, and the specialisations that are compiled ahead: by CI for three architectures, and by
`zhilight kernels compile`.

A kernel module offers `catalogue()`, which yields the kernels of the shapes that the supported models use: each code path of
the file once, and no more than it takes to hold the compiler to its bounds.
"""

import importlib
from collections.abc import Iterator

from zhilight.driver.compiler import Capability, Kernel

MODULES = (
    "activation",
    "attention_decode",
    "attention_prefill",
    "embedding",
    "gemm_sm80",
    "gemm_sm90",
    "gemm_small",
    "gemm_swapped",
    "logprobs",
    "norm",
    "rotary",
    "sampling",
)
"""Names of the modules in zhilight.kernels that hold kernels."""


def catalogue(capability: Capability | None = None) -> Iterator[Kernel]:
    """All specialisations, or those that can run at `capability`."""
    for name in MODULES:
        for kernel in importlib.import_module(f"zhilight.kernels.{name}").catalogue():
            if capability is None or kernel.supports(capability):
                yield kernel
