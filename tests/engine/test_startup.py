"""What the engine chooses where the configuration leaves it open."""

from types import SimpleNamespace

import pytest

from zhilight.config.engine import EngineConfig
from zhilight.engine.startup import GIB, token_budget


def device(name: str, gib: int = 0) -> SimpleNamespace:
    return SimpleNamespace(name=name, device=SimpleNamespace(total_bytes=gib * GIB))


@pytest.mark.parametrize(("ops", "offline", "expected"), [
    (device("cuda", 139), True, 16896), (device("cuda", 79), True, 16896), (device("cuda", 23), True, 8448),
    (device("cuda", 139), False, 8448), (device("cpu"), True, 8448)])
def test_default_token_budget(ops, offline, expected):
    assert token_budget(EngineConfig("any"), ops, offline) == expected


def test_a_given_budget_is_kept_and_a_full_decode_batch_always_fits():
    ops = device("cuda", 139)
    assert token_budget(EngineConfig("any", max_num_batched_tokens=512), ops, True) == 512
    assert token_budget(EngineConfig("any", max_num_seqs=20000), ops, False) == 20000
