"""Run a model without the engine: one sequence in blocks 1, 2, ... of its own cache, greedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from zhilight.models.model import Model
from zhilight.ops.base import Ops, Step, StepArrays

GOLDEN = Path(__file__).parent


class Sequence:
    """One sequence of a model: its cache and the tokens it holds. Block tables are scattered on purpose."""

    def __init__(self, ops: Ops, model: Model, max_len: int, block_size: int = 16):
        config = model.config
        blocks = -(-max_len // block_size)
        self.ops, self.model, self.block_size, self.length = ops, model, block_size, 0
        self.kv_cache = ops.kv_cache(config.num_layers, blocks + 1, config.num_kv_heads, block_size, config.head_dim)
        self.table = np.random.default_rng(blocks).permutation(blocks) + 1

    def step(self, token_ids: list[int], logit_rows: list[int]) -> Step:
        count = len(token_ids)
        positions = np.arange(self.length, self.length + count)
        self.length += count
        return self.ops.prepare_step(StepArrays(
            token_ids=np.array(token_ids, np.int32),
            positions=positions.astype(np.int32),
            slot_mapping=(self.table[positions // self.block_size] * self.block_size
                          + positions % self.block_size).astype(np.int64),
            block_tables=self.table[None].astype(np.int32),
            context_lens=np.array([self.length], np.int32),
            query_start=np.array([0, count], np.int32),
            logit_rows=np.array(logit_rows, np.int32),
            num_decodes=1 if count == 1 else 0,
        ))

    def logits(self, token_ids: list[int], last_only: bool = False) -> np.ndarray:
        """Logits [tokens, vocabulary] (or [1, vocabulary]) of the next tokens of the sequence."""
        rows = [len(token_ids) - 1] if last_only else list(range(len(token_ids)))
        with self.ops.scope():
            return self.ops.download(self.model(self.step(token_ids, rows), self.kv_cache))


def greedy(ops: Ops, model: Model, prompt_ids: list[int], max_tokens: int, stop: tuple[int, ...]) -> list[int]:
    """Greedy tokens after a prompt, the stop token included."""
    sequence = Sequence(ops, model, len(prompt_ids) + max_tokens)
    output = [int(sequence.logits(prompt_ids, last_only=True).argmax())]
    while output[-1] not in stop and len(output) < max_tokens:
        output.append(int(sequence.logits(output[-1:]).argmax()))
    return output


def save_folder(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray], shards: int = 1) -> None:
    """Write a model folder in Hugging Face format, in `shards` files with an index when there are several."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return
    names = list(weights)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        members = names[shard::shards]
        save_file({name: weights[name] for name in members}, folder / file)
        weight_map |= dict.fromkeys(members, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
