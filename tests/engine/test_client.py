"""The engine process and its async face: streams, aborts, refusals, death, drain, idleness."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import pytest_asyncio
import zmq
from tiny_llama import VOCAB, write_tiny_llama

from zhilight import LLM, EngineConfig, SamplingParams
from zhilight.engine.client import AsyncEngine
from zhilight.errors import ConfigError, EngineBusy, EngineDead, RequestError

SETTINGS = {"device": "cpu", "block_size": 16, "num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 512,
            "check_invariants": True, "stats_interval": 0.0}
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def params(**extra) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 20, "ignore_eos": True, **extra})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest_asyncio.fixture
async def engine(folder):
    engine = await AsyncEngine.start(EngineConfig(str(folder), **SETTINGS))
    yield engine
    await engine.close()


async def tokens_of(stream) -> list[int]:
    result = []
    async for output in stream:
        result += output.outputs[0].token_ids
    return result


async def settled(engine) -> None:
    """Wait until nothing runs any more."""
    for _ in range(200):
        if not engine.stats().running and not engine.stats().waiting and engine.stats().kv_usage == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still busy: {engine.stats()}")


async def test_it_gives_what_the_offline_face_gives(engine, folder):
    ids = engine.tokenizer.encode("hello world, again and again")
    pieces = [output async for output in engine.generate(ids, params(logprobs=2, prompt_logprobs=1), "a", prompt="hello")]
    (whole,) = LLM(str(folder), **SETTINGS).generate({"prompt_token_ids": ids}, params(logprobs=2, prompt_logprobs=1),
                                                     use_tqdm=False)
    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text
    assert [entry for piece in pieces for entry in piece.outputs[0].logprobs] == whole.outputs[0].logprobs
    assert pieces[0].prompt_logprobs == whole.prompt_logprobs
    assert all(piece.prompt_logprobs is None for piece in pieces[1:])
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].outputs[0].finish_reason == "length"
    metrics = pieces[-1].metrics
    assert metrics.arrival <= metrics.first_scheduled <= metrics.first_token < metrics.last_token <= metrics.finished
    again = [output async for output in engine.generate(ids, params(), "a")]
    assert again[0].cached_tokens == 16


async def test_many_at_once_and_several_choices(engine):
    ids = engine.tokenizer.encode("one of many")
    alone = await tokens_of(engine.generate(ids, params(), "alone"))
    results = await asyncio.gather(*(tokens_of(engine.generate(ids, params(), f"r{i}")) for i in range(40)))
    assert all(result == alone for result in results)
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    async for output in engine.generate(ids, params(n=3, temperature=1.0, seed=1), "n"):
        for choice in output.outputs:
            seen[choice.index] += choice.token_ids
    assert len({tuple(tokens) for tokens in seen.values()}) == 3
    await settled(engine)
    assert engine.stats().generation_tokens == 20 * (1 + 40 + 3)


@pytest.mark.parametrize("moment", [0, 1, 5])
async def test_leaving_the_stream_aborts(engine, moment):
    stream = engine.generate([5, 6, 7], LONG, "left")
    task = asyncio.create_task(anext(stream))
    if moment:
        await task
        for _ in range(moment - 1):
            await anext(stream)
        await stream.aclose()
    else:
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await settled(engine)
    assert engine.stats().generation_tokens < 400
    assert await tokens_of(engine.generate([5, 6], params(max_tokens=3), "left"))


async def test_abort_by_id_ends_the_stream_with_its_reason(engine):
    outputs = []
    async for output in engine.generate([5, 6, 7], LONG, "x"):
        outputs.append(output)
        if len(outputs) == 3:
            await engine.abort("x")
            await engine.abort("x")
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    await engine.abort("x")
    await engine.abort("never there")
    await settled(engine)
    assert engine.stats().aborts == 1


async def test_a_stop_string_ends_the_sequence_in_the_engine_too(engine):
    ids = engine.tokenizer.encode("stop me")
    text = "".join([o.outputs[0].text async for o in engine.generate(ids, LONG, "free")])
    stop = text[20:23]
    pieces = [o.outputs[0] async for o in engine.generate(ids, params(max_tokens=400, stop=(stop,)), "cut")]
    assert "".join(piece.text for piece in pieces) == text[: text.index(stop)]
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", stop)
    await settled(engine)
    assert engine.stats().generation_tokens < 400 + 100


async def test_refusals_name_the_field(engine):
    for prompt, sampling, param in [([], params(), "prompt"), ([VOCAB], params(), "prompt"), ([5] * 600, params(), "prompt"),
                                    ([5] * 500, params(), "max_tokens")]:
        with pytest.raises(RequestError) as caught:
            await anext(engine.generate(prompt, sampling, "bad"))
        assert caught.value.param == param
    from zhilight import StructuredOutput

    with pytest.raises(RequestError):
        await anext(engine.generate([5], SamplingParams(structured=StructuredOutput("regex", "(")), "bad"))
    stream = engine.generate([5], LONG, "twin")
    await anext(stream)
    with pytest.raises(RequestError, match="already running"):
        await anext(engine.generate([5], LONG, "twin"))
    await stream.aclose()
    await settled(engine)


async def test_a_full_queue_is_busy(folder):
    engine = await AsyncEngine.start(EngineConfig(str(folder), **SETTINGS | {"max_waiting": 4, "max_num_seqs": 1}))
    try:
        streams = [engine.generate([5, 6], LONG, f"r{i}") for i in range(5)]
        await anext(streams[0])
        tasks = [asyncio.create_task(anext(stream)) for stream in streams[1:]]
        await asyncio.sleep(0)
        with pytest.raises(EngineBusy, match="max_waiting is 4"):
            await anext(engine.generate([5, 6], LONG, "late"))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await streams[0].aclose()
        assert await tokens_of(engine.generate([5], params(max_tokens=2), "next"))
    finally:
        await engine.close()


async def test_embedding(engine):
    ids = engine.tokenizer.encode("embed this")
    one, two = await asyncio.gather(engine.embed(ids), engine.embed(ids))
    assert one.shape == (48,)
    assert (one == two).all()
    with pytest.raises(RequestError):
        await engine.embed([])
    length = engine.max_model_len
    assert (await engine.embed([5] * length)).shape == (48,)
    with pytest.raises(RequestError, match=f"{length + 1} tokens"):
        await engine.embed([5] * (length + 1))


async def test_death_is_noticed_at_once(engine):
    stream = engine.generate([5, 6, 7], LONG, "x")
    await anext(stream)
    os.kill(engine.pid, signal.SIGKILL)
    begin = time.monotonic()
    await asyncio.wait_for(engine.dead.wait(), 1.0)
    with pytest.raises(EngineDead, match="SIGKILL"):
        await tokens_of(stream)
    assert time.monotonic() - begin < 1
    with pytest.raises(EngineDead):
        await anext(engine.generate([5], params(), "y"))
    with pytest.raises(EngineDead):
        await engine.embed([5])
    await engine.abort("x")


async def test_messages_that_cannot_be_read_are_the_engines_end(engine, caplog):
    stream = engine.generate([5, 6, 7], LONG, "x")
    await anext(stream)
    with zmq.Context() as context, context.socket(zmq.PUSH) as other, caplog.at_level(logging.CRITICAL):
        other.connect(engine._process.from_engine)
        other.send(b"\xc1")
        with pytest.raises(EngineDead, match="cannot be read"):
            await asyncio.wait_for(tokens_of(stream), 5)
    assert engine.dead.is_set()


async def test_drain_lets_running_requests_finish_and_refuses_new_ones(engine):
    running = asyncio.create_task(tokens_of(engine.generate([5, 6], params(max_tokens=200), "r")))
    await asyncio.sleep(0.05)
    draining = asyncio.create_task(engine.drain(20))
    await asyncio.sleep(0)
    with pytest.raises(EngineBusy, match="shutting down"):
        await anext(engine.generate([5], params(), "new"))
    assert len(await running) == 200
    await draining


async def test_drain_aborts_what_takes_too_long(engine):
    stream = engine.generate([5, 6], LONG, "r")
    await anext(stream)
    await engine.drain(0.0)
    outputs = [output async for output in stream]
    assert outputs[-1].outputs[0].finish_reason == "abort"


async def test_signals_do_not_end_it_but_close_does(engine):
    os.kill(engine.pid, signal.SIGTERM)
    os.kill(engine.pid, signal.SIGINT)
    assert await tokens_of(engine.generate([5], params(max_tokens=2), "r"))
    folder, pid = Path(engine._process.folder), engine.pid
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    await engine.close()
    await engine.close()
    assert not folder.exists()
    assert not Path(f"/proc/{pid}").exists()
    assert engine.dead.is_set()


async def test_a_start_that_fails_says_why(tmp_path, folder):
    with pytest.raises(ConfigError, match="neither a folder nor"):
        await AsyncEngine.start(EngineConfig(str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match="max_model_len is 1000"):
        await AsyncEngine.start(EngineConfig(str(folder), **SETTINGS | {"max_model_len": 1000}))


def test_the_engine_ends_with_its_parent(folder):
    script = ("import asyncio\nfrom zhilight import AsyncEngine, EngineConfig\n"
              f"config = EngineConfig({str(folder)!r}, device='cpu', num_kv_blocks=64)\n"
              "async def main():\n    engine = await AsyncEngine.start(config)\n"
              "    print(engine.pid, engine._process.folder, flush=True)\n    await asyncio.sleep(60)\nasyncio.run(main())\n")
    root = str(Path(__file__).resolve().parents[2])
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": root})
    pid, sockets = parent.stdout.readline().decode().split()
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 2
    while _runs(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(int(pid))
    assert not Path(sockets).exists()


async def test_an_idle_engine_sleeps_and_wakes_at_once(engine):
    await tokens_of(engine.generate([5, 6], params(), "warm"))
    await settled(engine)
    before, begin = _cpu_seconds(engine.pid), time.monotonic()
    await asyncio.sleep(1.5)
    share = (_cpu_seconds(engine.pid) - before) / (time.monotonic() - begin)
    assert share < 0.02
    waits = []
    for i in range(10):
        await asyncio.sleep(0.02)
        begin = time.monotonic()
        stream = engine.generate([5, 6], params(max_tokens=1), f"w{i}")
        await anext(stream)
        waits.append(time.monotonic() - begin)
        await stream.aclose()
    assert min(waits) < 0.02


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _runs(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
