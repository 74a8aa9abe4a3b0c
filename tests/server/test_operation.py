"""What surrounds the routes: errors, keys, disconnects, limits, shutdown."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.server.conftest import Running, Start
from tests.server.stub_engine import StubEngine
from zhilight.config.engine import EngineConfig
from zhilight.errors import ConfigError, EngineBusy, EngineDead, RequestError
from zhilight.server.config import ServerConfig
from zhilight.server.openai.entrypoints.api_server import Server, bind

Body = dict[str, Any]
CHAT = "/v1/chat/completions"


async def until(condition: Any, seconds: float = 5.0) -> None:
    for _ in range(int(seconds / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true")


def head(body: bytes, path: str = CHAT) -> bytes:
    return (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n").encode() + body


# ---- errors ----


async def test_unknown_route_model_and_method(running: Running, hello: Body) -> None:
    status, answer = await running.post("/v1/nothing", {})
    assert (status, answer["error"]["code"]) == (404, "route_not_found")
    status, answer = await running.post(CHAT, hello | {"model": "gpt-4"})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    async with running.http.get(running.url + CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_sdk_raises_its_own_errors_and_does_not_repeat(running: Running) -> None:
    client = running.client(max_retries=3)
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="x", messages=[{"role": "user", "content": "hi"}])
    running.engine.fail_with = RequestError("temperature is bad", param="temperature")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="stub-model", messages=[{"role": "user", "content": "hi"}])
    assert caught.value.param == "temperature"
    assert await running.metric("zhilight:http_requests_total") == 2 + 0


async def test_busy_engine_is_503_with_retry_after_also_for_streams(running: Running, hello: Body) -> None:
    running.engine.fail_with = EngineBusy("4096 requests wait already", retry_after=7)
    for stream in (False, True):
        async with running.http.post(running.url + CHAT, json=hello | {"stream": stream}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "7"
            assert (await response.json())["error"]["type"] == "service_unavailable_error"


async def test_unexpected_fault_is_500_without_its_text(running: Running, hello: Body, caplog: Any) -> None:
    running.engine.fail_with = KeyError("secret detail")
    status, answer = await running.post(CHAT, hello)
    assert status == 500
    assert "secret" not in json.dumps(answer)
    assert "secret detail" in caplog.text


async def test_failure_before_the_first_token_is_a_status_and_later_an_event(running: Running, hello: Body) -> None:
    running.engine.fail_after = 0
    status, answer = await running.post(CHAT, hello | {"stream": True})
    assert (status, answer["error"]["message"]) == (500, "all tokens are masked")
    running.engine.fail_after = 4
    async with running.http.post(running.url + CHAT, json=hello | {"stream": True}) as response:
        assert response.status == 200
        text = await response.text()
    assert 'event: error\ndata: {"error":{"message":"all tokens are masked"' in text
    assert text.endswith("data: [DONE]\n\n")
    with pytest.raises(openai.APIError, match="all tokens are masked"):
        stream = await running.client().chat.completions.create(
            model="stub-model", messages=[{"role": "user", "content": "hi"}], stream=True)
        async for _ in stream:
            pass


@pytest.mark.parametrize(("data", "code"), [
    (b"", "invalid_json"), (b"{", "invalid_json"), (b"nonsense", "invalid_json"), (b'{"user": "\xff"}', "invalid_json"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "invalid_json"), (b"[]", None), (b'{"messages": NaN}', "invalid_json"),
    (b'{"messages":[{"role":"user","content":"\\ud800"}]}', "invalid_json"), (b"null", None),
])
async def test_bad_json_is_400(running: Running, data: bytes, code: str | None) -> None:
    async with running.http.post(running.url + CHAT, data=data, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert code is None or error["code"] == code


async def test_body_limit_type_and_encoding(start: Start, hello: Body) -> None:
    running = await start(max_body_mb=1)
    async with running.http.post(running.url + CHAT, data=b'{"messages": "' + b"x" * (1 << 20) + b'"}') as response:
        assert response.status == 413
        assert (await response.json())["error"]["message"].startswith("The request body is larger")
    async with running.http.post(running.url + CHAT, data={"a": "b"}) as response:
        assert response.status == 415
    async with running.http.post(running.url + CHAT, data=gzip.compress(json.dumps(hello).encode()), headers={
            "Content-Type": "application/json", "Content-Encoding": "gzip"}) as response:
        assert response.status == 415
    assert (await running.post(CHAT, hello))[0] == 200


# ---- keys, ids, CORS ----


async def test_keys(start: Start, hello: Body, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    running = await start(api_key=("first-secret", "sécond"), access_log=True)
    for headers, expected in [({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "first-secret"}, 401),
                              ({"Authorization": "Basic first-secret"}, 401), ({"Authorization": "Bearer first-secret"}, 200),
                              ({"Authorization": "bearer  sécond"}, 200)]:
        status, answer = await running.post(CHAT, hello, headers=headers)
        assert status == expected, headers
        if expected == 401:
            assert answer["error"]["type"] == "authentication_error"
    for path in ("/health", "/ping", "/version", "/metrics", "/", "/docs", "/openapi.json", "/api/check_health"):
        async with running.http.get(running.url + path) as response:
            assert response.status == 200, path
    for path in ("/v1/models", "/tokenizer_info", "/nowhere"):
        async with running.http.get(running.url + path) as response:
            assert response.status == 401, path
    with pytest.raises(openai.AuthenticationError):
        await running.client(api_key="bad").models.list()
    assert "first-secret" not in caplog.text
    assert "first-secret" not in repr(running.server.config)


async def test_request_id_in_and_out(running: Running, hello: Body) -> None:
    async with running.http.post(running.url + CHAT, json=hello, headers={"X-Request-Id": "abc-1"}) as response:
        assert response.headers["X-Request-Id"] == "abc-1"
        assert (await response.json())["id"] == "chatcmpl-abc-1"
    async with running.http.post(running.url + CHAT, json=hello | {"stream": True, "request_id": "mine"}) as response:
        assert len(response.headers["X-Request-Id"]) == 32
        assert b'"chatcmpl-mine"' in await response.read()
    async with running.http.post(running.url + CHAT, json=hello, headers={"X-Request-Id": "x" * 500}) as response:
        assert len(response.headers["X-Request-Id"]) == 32


async def test_two_requests_with_the_same_id_do_not_disturb_each_other(running: Running, hello: Body) -> None:
    answers = await asyncio.gather(*(running.post(CHAT, hello | {"request_id": "same"}) for _ in range(3)))
    assert [status for status, _ in answers] == [200] * 3


async def test_cors(start: Start, hello: Body) -> None:
    running = await start(allowed_origins=("https://good.example",), allow_credentials=True, api_key=("k",))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    async with running.http.options(running.url + CHAT, headers=asked | {"Origin": "https://good.example"}) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "https://good.example"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization"
    async with running.http.options(running.url + CHAT, headers=asked | {"Origin": "https://bad.example"}) as response:
        assert response.status == 400
    for stream in (False, True):
        async with running.http.post(running.url + CHAT, json=hello | {"stream": stream}, headers={
                "Origin": "https://good.example", "Authorization": "Bearer k"}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "https://good.example"
            assert response.headers["Access-Control-Allow-Credentials"] == "true"
    open_to_all = await start()
    async with open_to_all.http.post(open_to_all.url + CHAT, json=hello, headers={"Origin": "https://x.example"}) as response:
        assert response.headers["Access-Control-Allow-Origin"] == "*"


# ---- clients that go away, or do not read, or do not speak ----


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after_first_token", [False, True])
async def test_disconnect_aborts(start: Start, hello: Body, stream: bool, after_first_token: bool) -> None:
    engine = StubEngine()
    engine.script = lambda ids, params, index: "x" * 2000
    engine.delay = 0.005
    if not after_first_token:
        engine.hold = asyncio.Event()
    running = await start(engine)
    _, writer = await running.raw(head(json.dumps(hello | {"stream": stream}).encode()))
    await until(lambda: engine.active)
    await asyncio.sleep(0.05 if after_first_token else 0)
    writer.close()
    await until(lambda: engine.aborted)
    await until(lambda: running.server.serving.in_flight == 0)
    assert not engine.active
    assert await running.metric("zhilight:request_success_total") == 1
    assert (await running.post(CHAT, hello | {"max_tokens": 1}))[0] == 200 if after_first_token else True


async def test_disconnect_aborts_every_prompt(start: Start) -> None:
    engine = StubEngine()
    engine.hold = asyncio.Event()
    running = await start(engine)
    _, writer = await running.raw(head(json.dumps({"prompt": ["a", "b", "c"]}).encode(), "/v1/completions"))
    await until(lambda: len(engine.active) == 3)
    writer.close()
    await until(lambda: len(engine.aborted) == 3)


async def test_a_client_that_stops_reading_is_cut_off(start: Start, hello: Body) -> None:
    engine = StubEngine(max_model_len=1 << 20)
    engine.script = lambda ids, params, index: "x" * 100_000
    running = await start(engine, stall_timeout=0.5)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", running.server.port))
    await loop.sock_sendall(sock, head(json.dumps(hello | {"stream": True}).encode()))
    await until(lambda: engine.active)
    await until(lambda: engine.aborted, 20)
    await until(lambda: running.server.serving.in_flight == 0)
    sock.close()


async def test_slow_headers_and_bodies_are_cut_off(start: Start, hello: Body) -> None:
    running = await start(header_timeout=0.3, body_timeout=0.3)
    reader, _ = await running.raw(b"POST /v1/chat/completions HTTP/1.1\r\nHo")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 5)
    reader, _ = await running.raw(head(b'{"messages": ')[:-1].replace(b"Content-Length: 13", b"Content-Length: 500"))
    answer = await asyncio.wait_for(reader.read(), 15)
    assert answer.startswith(b"HTTP/1.1 408 ")
    reader, _ = await running.raw(head(json.dumps(hello).encode()))
    await asyncio.sleep(0.5)  # a connection that did speak is kept
    assert (await reader.read(100)).startswith(b"HTTP/1.1 200 ")


async def test_idle_connections_are_closed(start: Start) -> None:
    running = await start(keepalive_timeout=0.3)
    reader, _ = await running.raw(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)  # up to the end of the connection
    assert answer.startswith(b"HTTP/1.1 200 ")


async def test_connection_limit(start: Start, hello: Body) -> None:
    running = await start(max_connections=5)
    kept = [await running.raw(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(5)]
    await until(lambda: len(running.server._runner.server.connections) == 5)
    reader, _ = await running.raw(b"")
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 1" in answer
    for _, writer in kept:
        writer.close()
    await until(lambda: not running.server._runner.server.connections)
    assert (await running.post(CHAT, hello))[0] == 200


@pytest.mark.parametrize("data", [
    b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /" + b"a" * 20000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n", b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
])
async def test_broken_http(running: Running, hello: Body, data: bytes) -> None:
    reader, writer = await running.raw(data)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 15)
    assert not answer or answer.split(b" ", 2)[1][:1] == b"4", answer[:200]
    assert (await running.post(CHAT, hello))[0] == 200


# ---- start, stop, death ----


async def test_drain_lets_requests_finish_and_refuses_new_ones(start: Start, hello: Body) -> None:
    engine = StubEngine()
    engine.hold = asyncio.Event()
    running = await start(engine)
    request = asyncio.create_task(running.post(CHAT, hello))
    idle_reader, idle_writer = await running.raw(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await idle_reader.read(1000)).startswith(b"HTTP/1.1 200 ")
    await until(lambda: engine.active)
    stopping = asyncio.create_task(running.server.stop(drain=10))
    await asyncio.sleep(0.05)
    idle_writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await idle_reader.read(1000)).startswith(b"HTTP/1.1 503 ")
    idle_writer.write(head(json.dumps(hello).encode()))
    assert (await idle_reader.read(1000)).startswith(b"HTTP/1.1 503 ")
    engine.hold.set()
    status, answer = await request
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello, world!")
    await asyncio.wait_for(stopping, 5)
    with pytest.raises(aiohttp.ClientConnectorError):
        await running.post(CHAT, hello)


async def test_dead_engine(start: Start, hello: Body) -> None:
    engine = StubEngine()
    engine.delay = 0.05
    running = await start(engine)
    request = asyncio.create_task(running.post(CHAT, hello))
    await until(lambda: engine.active)
    engine.dead.set()
    assert (await request)[0] == 503
    for path in ("/health", "/ping", "/api/check_health"):
        async with running.http.get(running.url + path) as response:
            assert response.status == 503
    status, answer = await running.post(CHAT, hello)
    assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
    assert issubclass(EngineDead, RuntimeError)


async def test_port_taken_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=f"port {taken.getsockname()[1]}: Address already in use"):
            bind(ServerConfig(host="127.0.0.1", port=taken.getsockname()[1]))


async def test_unix_socket(start: Start, tmp_path: Path, hello: Body) -> None:
    path = str(tmp_path / "z.sock")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()
    running = await start(uds=path)
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session, \
            session.post("http://local" + CHAT, json=hello) as response:
        assert response.status == 200
    with pytest.raises(ConfigError, match="another server listens"):
        bind(ServerConfig(uds=path))
    await running.server.stop(drain=0)
    assert not Path(path).exists()


async def test_tls(start: Start, tmp_path: Path, hello: Body) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                           "-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
                           "-keyout", key, "-out", certificate], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("needs the openssl command")
    running = await start(ssl_keyfile=str(key), ssl_certfile=str(certificate))
    context = ssl.create_default_context(cafile=str(certificate))
    async with running.http.post(f"https://127.0.0.1:{running.server.port}{CHAT}", json=hello | {"stream": True},
                                 ssl=context) as response:
        assert response.status == 200
        assert (await response.text()).endswith("data: [DONE]\n\n")
    with pytest.raises(ConfigError, match="ssl_certfile"):
        await Server(StubEngine(), ServerConfig(
            host="127.0.0.1", port=0, ssl_keyfile=str(key), ssl_certfile=str(key))).start(bind(running.server.config))


async def test_root_path_and_access_log(start: Start, hello: Body, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "zhilight.server.access")
    running = await start(root_path="/llm", access_log=True)
    for prefix in ("", "/llm"):
        assert (await running.post(prefix + CHAT, hello))[0] == 200
    lines = [record.getMessage() for record in caplog.records if record.name == "zhilight.server.access"]
    assert len(lines) == 2
    assert '"POST /llm/v1/chat/completions" 200' in lines[1]
    assert lines[1].split()[-2] == "ms" or " ms " in lines[1]


async def test_served_names(start: Start, hello: Body) -> None:
    running = await start(served_model_name=("main", "org/alias"))
    for name in ("main", "org/alias", None):
        status, answer = await running.post(CHAT, hello | {"model": name})
        assert (status, answer["model"]) == (200, name or "main")
    models = await running.client().models.list()
    assert [model.id for model in models.data] == ["main", "org/alias"]
    assert (await running.client().models.retrieve("org/alias")).id == "org/alias"
    with pytest.raises(openai.NotFoundError):
        await running.client().models.retrieve("stub-model")


async def test_a_priority_beyond_its_range_is_the_clients_fault(start: Start, hello: Body) -> None:
    running = await start(StubEngine(config=EngineConfig(model="stub-model", scheduling_policy="priority")))
    assert (await running.post(CHAT, hello | {"priority": -7}))[0] == 200
    status, answer = await running.post(CHAT, hello | {"priority": 2**70})
    assert (status, answer["error"]["param"]) == (400, "priority")
