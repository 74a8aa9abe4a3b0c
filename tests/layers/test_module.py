"""Modules: what is collected, what is shared, and where a checkpoint tensor lands in a stacked parameter."""

from __future__ import annotations

import numpy as np

from zhilight.layers.embedding import Embedding, Head
from zhilight.layers.linear import GatedLinear, Linear
from zhilight.layers.module import Constant, Module, Parameter, Shard
from zhilight.ops.cpu import CpuOps


class Tree(Module):
    def __init__(self):
        self.embed = Embedding("embed", 10, 4)
        self.layers = [Linear({f"{i}": 4}, 4, bias=True) for i in range(2)]
        self.head = Head("head", 10, 4, tied_to=self.embed)
        self.table = Constant(lambda: np.arange(3, dtype=np.float32))
        self.label = "not a module"


def test_members_are_found_once():
    tree = Tree()
    names = [part.name for parameter in tree.parameters() for part in parameter.parts]
    assert names == ["embed.weight", "0.weight", "0.bias", "1.weight", "1.bias"]
    assert [type(module).__name__ for module in tree.modules()] == ["Tree", "Embedding", "Linear", "Linear", "Head"]


def test_materialize_binds_everything():
    tree, ops = Tree(), CpuOps()
    tree.materialize(ops)
    assert all(module.ops is ops for module in tree.modules())
    assert all(parameter.array.shape == parameter.shape for parameter in tree.parameters())
    assert tree.head.weight.array is tree.embed.weight.array
    assert tree.table.array.tolist() == [0, 1, 2]


def test_stacked_rows():
    linear = Linear({"q": 4, "k": 2, "v": 2}, 3, bias=True, shard=Shard.ROWS)
    linear.materialize(CpuOps())
    for value, part in enumerate(linear.weight.parts):
        linear.weight.view(part)[:] = value
    assert [linear.weight.part_shape(part) for part in linear.weight.parts] == [(4, 3), (2, 3), (2, 3)]
    assert linear.weight.array[:, 0].tolist() == [0] * 4 + [1] * 2 + [2] * 2
    assert [part.name for part in linear.bias.parts] == ["q.bias", "k.bias", "v.bias"]


def test_gate_and_up_rows_alternate():
    linear = GatedLinear("gate", "up", 4, 3)
    linear.materialize(CpuOps())
    gate, up = linear.weight.parts
    linear.weight.view(gate)[:], linear.weight.view(up)[:] = 1, 2
    assert linear.weight.array[:, 0].tolist() == [1, 2] * 3
    assert linear.weight.part_shape(gate) == linear.weight.part_shape(up) == (3, 4)


def test_bias_of_a_column_split_layer_is_not_split():
    linear = Linear({"down": 4}, 6, bias=True, shard=Shard.COLUMNS)
    assert (linear.weight.shard, linear.bias.shard) == (Shard.COLUMNS, Shard.NONE)


def test_describing_a_model_takes_no_memory():
    assert not hasattr(Parameter((1 << 40, 1 << 20), "huge"), "array")
