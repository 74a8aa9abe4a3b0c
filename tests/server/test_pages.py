"""The page at /, the page at /docs, /openapi.json and the models of both."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Running, Start
from zhilight.server.openai import pages
from zhilight.server.openai.app import ROUTES


async def get(running: Running, path: str) -> tuple[int, str, Any]:
    async with running.http.get(running.url + path) as response:
        return response.status, await response.text(), response.headers


async def test_openapi_describes_every_route(running: Running) -> None:
    _, text, _ = await get(running, "/openapi.json")
    api = json.loads(text)
    described = {(method.upper(), path) for path, operations in api["paths"].items() for method in operations}
    expected = {(route.method, re.sub(r":[^}]*", "", route.path)) for route in ROUTES if not route.page}
    assert described == expected
    names = set(api["components"]["schemas"])
    references = set(re.findall(r"#/components/schemas/([^\"]+)", text))
    assert references <= names
    assert "stop_token_ids" in api["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    identifiers = [operation["operationId"] for operations in api["paths"].values() for operation in operations.values()]
    assert len(identifiers) == len(set(identifiers))


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_pages_need_no_foreign_host(running: Running, path: str) -> None:
    status, text, headers = await get(running, path)
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in headers["Content-Security-Policy"]
    files = re.findall(r'(?:src|href)="(static/[^"]+)"', text)
    assert files
    for name in files:
        assert (await get(running, "/" + name))[0] == 200
    folder = Path(pages.__file__).parent / "playground"
    for file in folder.iterdir():
        assert not re.search(r"https?://", file.read_text()), file


async def test_static_files_are_a_fixed_list(running: Running) -> None:
    for path in ("/static/..%2fapp.py", "/static/index.html", "/static/nothing"):
        assert (await get(running, path))[0] == 404


async def test_pages_can_be_turned_off(start: Start) -> None:
    running = await start(playground=False)
    assert (await get(running, "/"))[0] == 404
    assert (await get(running, "/docs"))[0] == 404
    assert (await get(running, "/openapi.json"))[0] == 200


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
async def test_page_in_a_browser(start: Start, tmp_path: Path) -> None:
    """Headless Chromium loads the page, sends a message and shows the streamed answer and the live figures."""
    running = await start()
    running.engine.script = lambda ids, params, index: "An answer <b>as text</b>."
    running.engine.delay = 0.01
    driver = await Browser.open(running.url + "/", tmp_path)
    try:
        await driver.run("document.getElementById('input').value = 'hello'; "
                         "document.getElementById('composer').requestSubmit();")
        body = await driver.until("document.querySelector('.message.assistant .note')?.textContent && "
                                  "document.querySelector('.message.assistant .body').textContent")
        assert body == "An answer <b>as text</b>."
        figures = await driver.until("document.querySelectorAll('.chart canvas').length")
        assert figures == 5
        assert await driver.until("document.getElementById('model').textContent") == "stub-model, context 4096"
        await driver.call("Page.navigate", url=running.url + "/docs")
        assert await driver.until("document.querySelectorAll('details').length > 20")
    finally:
        await driver.close()


class Browser:
    """As much of Chromium's DevTools protocol as the test needs."""

    @classmethod
    async def open(cls, url: str, profile: Path) -> Browser:
        import aiohttp

        self = cls()
        self.process = await asyncio.create_subprocess_exec(
            "chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", "--window-size=1280,800", url,
            stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL)
        while True:
            line = (await asyncio.wait_for(self.process.stderr.readline(), 60)).decode()
            if match := re.search(r"ws://([^/]+)/", line):
                break
        self.session = aiohttp.ClientSession()
        for _ in range(200):
            async with self.session.get(f"http://{match[1]}/json") as response:
                targets = [item for item in await response.json() if item["type"] == "page" and item["url"].startswith(url)]
            if targets:
                break
            await asyncio.sleep(0.1)
        self.socket = await self.session.ws_connect(targets[0]["webSocketDebuggerUrl"])
        self.number = 0
        await self.until("document.readyState === 'complete' && document.getElementById('model').textContent")
        return self

    async def call(self, method: str, **parameters: Any) -> Any:
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while True:
            message = await self.socket.receive_json(timeout=30)
            if message.get("id") == self.number:
                return message["result"]

    async def run(self, script: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        return result["result"].get("value")

    async def until(self, script: str) -> Any:
        for _ in range(300):
            if value := await self.run(script):
                return value
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true: {script}")

    async def close(self) -> None:
        await self.session.close()
        self.process.terminate()
        await self.process.wait()
