"""GGUF weights of llama and qwen2 under their Hugging Face names, dequantised and rounded to bfloat16.

llama.cpp keeps the rows of a llama's q and k in the order of interleaved rotary pairs; they are put back into the
half-split order here. Dequantisation runs in threads (NumPy releases the lock), a few blocks ahead of the copy.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from zhilight.config.gguf import GGUFFile, read_gguf
from zhilight.config.model import ModelConfig
from zhilight.weights.checkpoint import Block, Checkpoint, TensorEntry

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
"""Part of the rope configuration: read with the metadata."""
_BLOCK_ELEMENTS = 1 << 20


class GGUFCheckpoint(Checkpoint):
    """A GGUF file. A tied table that the file holds twice is read from output.weight, the finer quantised of the two."""

    def __init__(self, path: Path, config: ModelConfig):
        self.location = str(path)
        self._file: GGUFFile = read_gguf(path)
        self._config = config
        self._source: dict[str, str] = {}
        tied_twice = config.tie_word_embeddings and "output.weight" in self._file.tensors
        for name in self._file.tensors:
            if name == _ROPE_FACTORS or (tied_twice and name == "token_embd.weight"):
                continue
            self._source[hf_name("token_embd.weight" if tied_twice and name == "output.weight" else name)] = name
        self.entries = {}
        for name, source in self._source.items():
            tensor = self._file.tensors[source]
            elements = int(np.prod(tensor.shape, dtype=np.int64))
            self.entries[name] = TensorEntry(name, tensor.shape, f"ggml type {tensor.type}", 2 * elements)

    def blocks(self, names: Collection[str]) -> Iterator[Block]:
        pending: deque[Future[Block]] = deque()
        threads = min(8, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, "dequantise") as pool:
            for name, start, stop in self._jobs(names):
                pending.append(pool.submit(self._read, name, start, stop))
                if len(pending) > 2 * threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _jobs(self, names: Collection[str]) -> Iterator[tuple[str, int, int]]:
        for name in sorted(names, key=lambda name: self._file.tensors[self._source[name]].offset):
            shape = self.entries[name].shape
            if len(shape) == 1:
                yield name, 0, shape[0]
                continue
            head_dim = self._config.head_dim
            step = max(1, _BLOCK_ELEMENTS // (shape[1] * head_dim)) * head_dim     # whole heads, for q and k
            for start in range(0, shape[0], step):
                yield name, start, min(start + step, shape[0])

    def _read(self, name: str, start: int, stop: int) -> Block:
        import ml_dtypes

        source = self._source[name]
        values = self._file.rows(source) if len(self.entries[name].shape) == 1 else self._file.rows(source, start, stop)
        if self._config.architecture == "LlamaForCausalLM" and (".attn_q." in source or ".attn_k." in source):
            values = unpermute(values, self._config.head_dim)
        values = values.astype(ml_dtypes.bfloat16)
        return Block(name, start, values, values.nbytes)


def hf_name(name: str) -> str:
    """The Hugging Face name of a llama or qwen2 tensor; an unknown name is returned as it is, for the loader to report."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, stem, kind = match.groups()
    if layer is None:
        return f"{_TOP[stem]}.{kind}" if stem in _TOP else name
    return f"model.layers.{layer}.{_LAYER[stem]}.{kind}" if stem in _LAYER else name


def unpermute(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of whole heads from interleaved pairs (0, 1), (2, 3), ... to halves: value i pairs with i + head_dim / 2."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
