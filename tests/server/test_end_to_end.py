"""The server as a user starts it, in a process of its own with the real engine, on a tiny random model."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine.tiny_llama import MAX_LEN, write_tiny_llama

MODULE = [sys.executable, "-m", "zhilight.server.openai.entrypoints.api_server"]
ROOT = Path(__file__).parents[2]


class Process:
    """A running server: its log, its address, its exit code."""

    def __init__(self, *flags: str):
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ZHILIGHT_API_KEY": "from-environment"}
        self.process = subprocess.Popen([*MODULE, "--host", "127.0.0.1", "--port", "0", "--device", "cpu", *flags],
                                        stderr=subprocess.PIPE, text=True, env=environment)
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        if not self._ready.wait(120) or not self.url:
            self.process.kill()
            raise AssertionError("the server did not start:\n" + "".join(self.log))

    def _read(self) -> None:
        for line in self.process.stderr or ():
            self.log.append(line)
            if match := re.search(r"serves .* at (http\S+)", line):
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="from-environment", max_retries=0)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Process]:
    process = Process("--model-path", str(folder), "--served-model-name", "tiny", "other", "--cpu-kv-cache-gb", "0.05")
    yield process
    assert process.end() == 0


def test_chat_whole_and_streamed_are_equal_and_equal_the_offline_face(served: Process, folder: Path) -> None:
    from zhilight import LLM, SamplingParams

    client = served.client()
    request: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 24,
                               "temperature": 0}
    whole = client.chat.completions.create(**request)
    stream = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    llm = LLM(str(folder), device="cpu", cpu_kv_cache_gb=0.05)
    offline = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    llm.close()
    assert offline[0].outputs[0].text == text


def test_loglikelihood_as_harnesses_ask_for_it(served: Process, folder: Path) -> None:
    """lm-eval's local-completions: ids in, echo, logprobs 1, max_tokens 1; the sums equal the offline prompt_logprobs."""
    from zhilight import LLM, SamplingParams

    items = [[5, 9, 77, 120, 33], [1, 2, 3, 4, 5, 6, 7, 8], list(range(40, 90))]
    answer = served.client().completions.create(model="tiny", prompt=items, echo=True, logprobs=1, max_tokens=1, temperature=0,
                                                seed=1)
    llm = LLM(str(folder), device="cpu", cpu_kv_cache_gb=0.05)
    outputs = llm.generate(items, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    llm.close()
    for item, choice, output in zip(items, answer.choices, outputs, strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert len(logprobs.token_logprobs) == len(item) + 1
        served_sum = sum(logprobs.token_logprobs[2:-1])
        assert output.prompt_logprobs is not None
        direct = sum(entry.chosen.logprob for entry in output.prompt_logprobs[2:] if entry)
        assert served_sum == pytest.approx(direct, abs=1e-4)
        greedy = [entry.chosen.rank == 1 for entry in output.prompt_logprobs[2:] if entry]
        tops = zip(logprobs.tokens[2:-1], logprobs.top_logprobs[2:-1], strict=True)
        assert [token == max(top, key=top.__getitem__) for token, top in tops] == greedy


def test_choices_structured_output_and_embeddings(served: Process) -> None:
    client = served.client()
    answer = client.completions.create(model="other", prompt="abc", n=3, max_tokens=8, seed=4, temperature=1.0)
    again = client.completions.create(model="other", prompt="abc", n=3, max_tokens=8, seed=4, temperature=1.0)
    assert [choice.text for choice in answer.choices] == [choice.text for choice in again.choices]
    assert len({choice.text for choice in answer.choices}) == 3
    best = client.completions.create(model="other", prompt="abc", n=1, best_of=4, max_tokens=8, seed=4, temperature=1.0)
    assert len(best.choices) == 1
    assert best.choices[0].index == 0
    chosen = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}],
                                            extra_body={"guided_choice": ["north", "south"]})
    assert chosen.choices[0].message.content in ("north", "south")
    assert chosen.choices[0].finish_reason == "stop"
    vectors = client.embeddings.create(model="tiny", input=["abc", "abd"]).data
    assert sum(value * value for value in vectors[0].embedding) == pytest.approx(1, abs=1e-4)
    assert vectors[0].embedding != vectors[1].embedding


def test_errors_come_from_the_real_engine_too(served: Process) -> None:
    client = served.client()
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="tiny", prompt=[1] * MAX_LEN)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=served.url + "/v1", api_key="wrong", max_retries=0).models.list()
    assert "from-environment" not in "".join(served.log)


def test_a_dropped_stream_is_aborted_in_the_engine(served: Process) -> None:
    client = served.client()
    stream = client.completions.create(model="tiny", prompt="x", max_tokens=MAX_LEN - 1, stream=True,
                                       extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        text = client.get("/../metrics", cast_to=str)
        if re.search(r"num_aborts_total\{[^}]*\} [1-9]", text) and re.search(r"num_requests_running\{[^}]*\} 0\.0", text):
            return
        time.sleep(0.1)
    raise AssertionError("the engine still runs the request")


def test_death_of_the_engine_ends_the_server_with_an_error(folder: Path) -> None:
    process = Process("--model-path", str(folder), "--cpu-kv-cache-gb", "0.05")
    children = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(process.process.pid)], capture_output=True, text=True,
                              check=True).stdout.splitlines()
    engines = [line.split()[0] for line in children if "resource_tracker" not in line]
    os.kill(int(engines[0]), signal.SIGKILL)
    with pytest.raises((openai.InternalServerError, openai.APIConnectionError)):
        for _ in range(100):
            process.client().completions.create(model=str(folder), prompt="x", max_tokens=1)
            time.sleep(0.05)
    assert process.process.wait(30) == 1
    assert any("engine died" in line for line in process.log)


def test_faults_before_the_start_are_one_line(folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            (["--model-path", str(folder), "--port", port], f"cannot listen on 127.0.0.1 port {port}"),
            (["--model-path", str(tmp_path / "nothing")], "ConfigError"),
            (["--model-path", str(folder), "--max-model-len", "100000"], "max_model_len"),
        ]
        for flags, words in cases:
            done = subprocess.run([*MODULE, "--host", "127.0.0.1", "--port", "0", "--device", "cpu", *flags], text=True,
                                  capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120, check=False)
            assert done.returncode in (1, 2), flags
            assert words in done.stderr, done.stderr
            assert "Traceback" not in done.stderr


def test_a_stream_in_flight_survives_sigterm(folder: Path) -> None:
    process = Process("--model-path", str(folder), "--served-model-name", "tiny", "--cpu-kv-cache-gb", "0.05")
    client = process.client()
    stream = client.completions.create(model="tiny", prompt="x", max_tokens=300, stream=True,
                                       stream_options={"include_usage": True}, extra_body={"ignore_eos": True})
    iterator = iter(stream)
    next(iterator)
    process.process.send_signal(signal.SIGTERM)
    chunks = list(iterator)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 300
    assert process.process.wait(30) == 0
    assert any("shutting down" in line for line in process.log)
