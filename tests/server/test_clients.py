"""Other people's clients, where they are installed (`pip install zhilight[clients]`): langchain-openai, schemathesis."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pydantic
import pytest

from tests.server.conftest import Start

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


async def test_langchain(start: Start) -> None:
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.tools import tool

    running = await start(tool_call_parser="hermes")
    settings = {"model": "stub-model", "base_url": running.url + "/v1", "api_key": "none", "max_retries": 0}
    model = langchain.ChatOpenAI(**settings)
    answer = await model.ainvoke("hi")
    assert (answer.content, answer.usage_metadata["output_tokens"]) == ("Hello, world!", 14)
    assert "".join([chunk.content async for chunk in model.astream("hi")]) == "Hello, world!"
    assert [item.content for item in await model.abatch(["a", "b"])] == ["Hello, world!"] * 2
    assert await langchain.OpenAI(**settings).ainvoke("x") == "Hello, world!"
    embeddings = langchain.OpenAIEmbeddings(check_embedding_ctx_length=False, **settings)
    assert len(await embeddings.aembed_query("x")) == 8

    @tool
    def multiply(a: int, b: int) -> int:
        """Multiply."""
        return a * b

    running.engine.script = lambda ids, params, index: CALL
    bound = model.bind_tools([multiply])
    whole = await bound.ainvoke("six times seven")
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("multiply", {"a": 6, "b": 7})]
    streamed = None
    async for chunk in bound.astream("six times seven"):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [("multiply", {"a": 6, "b": 7})]

    class City(pydantic.BaseModel):
        name: str
        people: int

    running.engine.script = lambda ids, params, index: '{"name": "Oslo", "people": 7}'
    assert await model.with_structured_output(City).ainvoke("x") == City(name="Oslo", people=7)


async def test_schemathesis(start: Start, tmp_path: Path) -> None:
    """Requests made from /openapi.json: no 5xx, only documented statuses, answers as their schemas say."""
    pytest.importorskip("schemathesis")
    running = await start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "schemathesis.cli", "run", running.url + "/openapi.json", "--max-examples", "20", "--no-color",
        "--checks", "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tmp_path)
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-4000:]
    assert b"passed" in output
