"""Everything that steers the engine: one dataclass makes the Python arguments, the CLI flags and the docs table.

A field's metadata carries its help line, its choices and the further flag names it answers to (vLLM's where the
meaning is the same, and the names of ZhiLight's C++ predecessor).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from zhilight.errors import ConfigError


def _option(default: Any, help: str, *, choices: tuple | None = None, aliases: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "aliases": aliases})


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. Raises ConfigError when a value cannot be honoured."""

    model: str = field(metadata={
        "help": 'model folder, GGUF file, hub name, or "demo" (SmolLM2-135M-Instruct)',
        "choices": None, "aliases": ("--model-path",)})
    tokenizer: str | None = _option(None, "tokenizer folder or hub name, when not the model's own")
    skip_tokenizer_init: bool = _option(False, "read no tokenizer: token ids in and out only (offline)")
    revision: str | None = _option(None, "hub revision of the model")
    device: str = _option("auto", "where to run; auto takes the GPU when there is one", choices=("auto", "cuda", "cpu"))
    device_index: int = _option(0, "which GPU")
    dtype: str = _option("auto", "activation and weight dtype; auto follows the checkpoint (the CPU computes in float32)",
                         choices=("auto", "bfloat16", "float16", "float32"))
    load_format: str = _option("auto", "how weights are read; dummy makes random weights for benchmarks",
                               choices=("auto", "safetensors", "gguf", "dummy"))
    quantization: str | None = _option(None, "quantisation of the checkpoint, when its config does not say; not built yet",
                                       aliases=("-q",))
    max_model_len: int | None = _option(None, "longest prompt plus output, in tokens; default: the model's own limit")
    max_num_seqs: int = _option(256, "requests running at once", aliases=("--dyn-max-batch-size",))
    max_num_batched_tokens: int | None = _option(
        None,
        "tokens of one step: decode tokens plus prefill chunks; default: 8448, or 16896 offline on a GPU of 64 GiB or more")
    max_waiting: int = _option(4096, "requests waiting at once; more are answered 503 with Retry-After")
    block_size: int = _option(64, "tokens of one KV block", choices=(16, 32, 64, 128))
    num_kv_blocks: int | None = _option(None, "KV blocks, instead of as many as memory holds")
    gpu_memory_utilization: float = _option(0.90, "share of the GPU's memory that the engine may use")
    cpu_kv_cache_gb: float = _option(2.0, "KV cache of the CPU backend, in GiB")
    swap_space_gb: float = _option(0.0, "host memory for preempted requests' KV, in GiB; not built yet: 0 computes it again")
    kv_cache_dtype: str = _option("auto", "KV dtype; auto follows the activations; the others are not built yet",
                                  choices=("auto", "fp8_e4m3", "int8"))
    enable_prefix_caching: bool = _option(True, "share the KV of equal prompt prefixes")
    enable_chunked_prefill: bool = _option(True, "split a long prompt over several steps")
    enable_overlap: bool = _option(True, "prepare the next step while the device runs this one")
    scheduling_policy: str = _option("fcfs", "order of admission", choices=("fcfs", "priority"))
    enforce_eager: bool = _option(False, "no CUDA graphs for decode steps")
    max_graph_batch: int = _option(512, "largest decode batch captured as a graph")
    lazy_graphs: bool = _option(False, "capture a decode graph when it is first needed instead of all at start")
    seed: int | None = _option(None, "seed of requests that bring none; default: fresh entropy")
    tensor_parallel_size: int = _option(1, "GPUs that share each layer; above 1 is not built yet",
                                        aliases=("--tensor-parallel", "-tp"))
    pipeline_parallel_size: int = _option(1, "GPUs that share the layers in sequence; above 1 is not built yet",
                                          aliases=("-pp",))
    stats_interval: float = _option(1.0, "seconds between two statistics lines in the log; 0 is silent")
    drain_timeout: float = _option(30.0, "seconds that running requests get to finish at shutdown")
    check_invariants: bool = _option(False, "check the KV blocks' bookkeeping after every step, not only when idle")

    def __post_init__(self) -> None:
        for option in fields(self):
            choices = option.metadata.get("choices")
            value = getattr(self, option.name)
            if choices and value not in choices:
                raise ConfigError(f"{option.name} is {value!r}; it must be one of {', '.join(map(str, choices))}.")
        for name in ("max_num_seqs", "max_waiting", "tensor_parallel_size", "pipeline_parallel_size", "max_graph_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("max_model_len", "num_kv_blocks", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1.")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be in (0, 1].")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs ({self.max_num_seqs}): "
                "a full decode batch would not fit one step. Raise the first or lower the second.")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: this version runs on one GPU. Leave it at 1.")


def refuse_unknown_settings(names: Iterable[str]) -> None:
    """Raises ConfigError for the first name that is no field of EngineConfig, with the nearest one that is."""
    known = [option.name for option in fields(EngineConfig)]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise ConfigError(f"there is no setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else
                              f". The settings are the fields of EngineConfig: {', '.join(known)}."))
