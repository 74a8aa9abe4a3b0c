"""A real server on 127.0.0.1 around the stub engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import openai
import pytest
import pytest_asyncio

from tests.server.stub_engine import StubEngine
from zhilight.server.config import ServerConfig
from zhilight.server.openai.entrypoints.api_server import Server, bind


@dataclasses.dataclass
class Running:
    """A server that listens, with the clients a test needs."""

    server: Server
    engine: StubEngine
    http: aiohttp.ClientSession
    clients: list[openai.AsyncOpenAI] = dataclasses.field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def client(self, **settings: Any) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(**{"base_url": self.url + "/v1", "api_key": "none", "max_retries": 0} | settings)
        self.clients.append(client)
        return client

    async def post(self, path: str, body: Any, **settings: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, **settings) as response:
            return response.status, await response.json()

    async def raw(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(data)
        await writer.drain()
        return reader, writer

    async def metric(self, name: str) -> float:
        """Sum of a metric's samples over its labels."""
        async with self.http.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


Start = Callable[..., Any]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    """start(engine=None, **server settings) -> Running; everything is closed at the end."""
    running: list[Running] = []

    async def _start(engine: StubEngine | None = None, **settings: Any) -> Running:
        config = ServerConfig(**{"host": "127.0.0.1", "port": 0, "access_log": False} | settings)
        engine = engine or StubEngine()
        server = Server(engine, config)
        await server.start(bind(config))
        running.append(Running(server, engine, aiohttp.ClientSession()))
        return running[-1]

    yield _start
    for item in running:
        for client in item.clients:
            await client.close()
        await item.http.close()
        await item.server.stop(drain=0)


@pytest_asyncio.fixture
async def running(start: Start) -> Running:
    return await start()


@pytest.fixture
def hello() -> dict[str, Any]:
    """The smallest chat request."""
    return {"messages": [{"role": "user", "content": "hi"}]}
