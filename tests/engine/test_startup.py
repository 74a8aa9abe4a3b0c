"""What the engine chooses where the configuration leaves it open."""

import json
from types import SimpleNamespace

import pytest
import tiny_llama

from zhilight.config.engine import EngineConfig
from zhilight.engine import startup
from zhilight.engine.startup import GIB, token_budget
from zhilight.errors import ConfigError


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


def test_a_length_that_the_model_cannot_have_is_refused_before_a_device_is_taken(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_llama.CONFIG))
    monkeypatch.setattr(startup, "open_device", lambda *_: pytest.fail("the device was opened"))
    with pytest.raises(ConfigError, match="max_model_len is 100000"):
        startup.start_engine(EngineConfig(str(tmp_path), load_format="dummy", max_model_len=100000))
