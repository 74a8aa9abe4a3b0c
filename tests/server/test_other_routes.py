"""Tokenize, detokenize, embeddings, metrics, version."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.server.conftest import Running, Start
from zhilight.version import __version__


async def test_tokenize_and_back(running: Running) -> None:
    status, answer = await running.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
    assert (status, answer["tokens"], answer["count"]) == (200, [104, 195, 169], 3)
    assert answer["max_model_len"] == 4096
    assert len(answer["token_strs"]) == 3
    status, answer = await running.post("/detokenize", {"tokens": [104, 195, 169]})
    assert (status, answer["prompt"]) == (200, "hé")
    status, answer = await running.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    ids = answer["tokens"]
    status, _ = await running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert running.engine.requests[0][0] == ids


@pytest.mark.parametrize(("path", "body"), [
    ("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": []}), ("/tokenize", {"prompt": 5}), ("/detokenize", {}),
    ("/detokenize", {"tokens": [999]}), ("/detokenize", {"tokens": [-1]}), ("/tokenize", {"messages": []}),
    ("/tokenize", {"prompt": "a" * 300_000}),
])
async def test_bad_bodies(running: Running, path: str, body: Any) -> None:
    status, answer = await running.post(path, body)
    assert status == 400, answer


async def test_tokenizer_info_and_version(running: Running) -> None:
    async with running.http.get(running.url + "/tokenizer_info") as response:
        info = await response.json()
    assert info["eos_token"] == "<|im_end|>"
    async with running.http.get(running.url + "/version") as response:
        assert await response.json() == {"version": __version__}


async def test_embeddings(running: Running) -> None:
    answer = await running.client().embeddings.create(model="stub-model", input=["a", "bcd"])  # the SDK asks for base64
    expected = np.arange(1, 9) / np.linalg.norm(np.arange(1, 9))
    assert [item.index for item in answer.data] == [0, 1]
    np.testing.assert_allclose(answer.data[0].embedding, expected, rtol=1e-5)
    assert answer.usage.prompt_tokens == 4
    _, answer = await running.post("/v1/embeddings", {"input": [1, 2, 3]})
    np.testing.assert_allclose(answer["data"][0]["embedding"], expected, rtol=1e-5)
    _, answer = await running.post("/v1/embeddings", {"input": [[1], [2]], "encoding_format": "base64"})
    assert np.frombuffer(base64.b64decode(answer["data"][1]["embedding"]), "<f4").shape == (8,)


@pytest.mark.parametrize("fields", [{"input": []}, {"input": ""}, {"dimensions": 4}, {"input": [1] * 5000}, {"input": [[300]]},
                                    {"encoding_format": "hex"}, {"input": {}}])
async def test_bad_embedding_requests(running: Running, fields: Any) -> None:
    status, _ = await running.post("/v1/embeddings", {"input": "a"} | fields)
    assert status == 400


async def test_metrics(start: Start) -> None:
    running = await start()
    running.engine.figures.prompt_tokens = 11
    running.engine.figures.kv_usage = 0.25
    running.engine.figures.steps, running.engine.figures.device_seconds = 7, 1.5
    await running.post("/v1/completions", {"prompt": "abc", "max_tokens": 4})
    await running.post("/v1/completions", {"prompt": "abc", "max_tokens": 0})
    for name, expected in {
        "zhilight:time_to_first_token_seconds_count": 1, "zhilight:inter_token_latency_seconds_count": 3,
        "zhilight:e2e_request_latency_seconds_count": 1, "zhilight:request_generation_tokens_sum": 4,
        "zhilight:request_prompt_tokens_sum": 3, "zhilight:prompt_tokens_total": 11, "zhilight:kv_cache_usage_perc": 0.25,
        "zhilight:engine_steps_total": 7,
        "zhilight:engine_device_seconds_total": 1.5, "zhilight:request_success_total": 1, "zhilight:http_requests_total": 2,
        "zhilight:num_requests_running": 0,
    }.items():
        value = await running.metric(name)
        if name == "zhilight:http_requests_total":
            assert value >= expected
        else:
            assert value == expected, name


async def test_strange_methods_and_paths_do_not_fill_the_metrics(running: Running) -> None:
    for number in range(30):
        async with running.http.request("PROPFIND", running.url + f"/path/{number}"):
            pass
    async with running.http.get(running.url + "/metrics") as response:
        lines = [line for line in (await response.text()).splitlines() if line.startswith("zhilight:http_requests_total")]
    assert lines == ['zhilight:http_requests_total{handler="unknown",method="other",status="404"} 30.0']


async def test_dashboard_uses_metrics_that_exist(running: Running) -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana_dashboard.json").read_text())
    await running.post("/v1/completions", {"prompt": "abc"})
    async with running.http.get(running.url + "/metrics") as response:
        exposed = await response.text()
    used = {name for panel in dashboard["panels"] for target in panel["targets"]
            for name in re.findall(r"zhilight:\w+", target["expr"])}
    assert len(used) >= 10
    for name in used:
        assert f"\n{name}{{" in exposed or f"\n{name} " in exposed, name
