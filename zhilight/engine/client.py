"""The async face: `AsyncEngine` talks to an engine process from an asyncio loop. One loop, no threads but a watcher."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from zhilight import errors
from zhilight.config.engine import EngineConfig
from zhilight.config.model import ModelConfig
from zhilight.config.sampling import SamplingParams
from zhilight.engine.collector import CollectedRequest, Collector
from zhilight.engine.messages import Abort, Embed, EngineStats, Failed, FromEngine, Ready, Shutdown, Start, StepOutput
from zhilight.engine.outputs import RequestOutput
from zhilight.engine.process import EngineProcess, encode_other
from zhilight.engine.request import validate_embedding, validate_prompt
from zhilight.errors import EngineBusy, EngineDead, RequestError, ZhiLightError

if TYPE_CHECKING:
    from zhilight.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_PATIENCE = 5.0
"""Seconds that the engine process gets to end by itself."""
_PATIENCE_AT_START = 0.5


class _Stream:
    """A request and the event that wakes its consumer."""

    def __init__(self, request: CollectedRequest):
        self.request = request
        self.news = asyncio.Event()


class AsyncEngine:
    """An engine in a process of its own. Make one with `await AsyncEngine.start(config)`; use it from that loop only."""

    config: EngineConfig
    """As asked for, with what was left open (max_model_len, num_kv_blocks) filled in."""
    model_config: ModelConfig
    tokenizer: Tokenizer
    max_model_len: int

    def __init__(self) -> None:
        self._process = EngineProcess()
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._inbox = zmq.asyncio.Context.shadow(self._context).socket(zmq.PULL)
        for socket in (self._outbox, self._inbox):
            socket.sndhwm = socket.rcvhwm = 0
            socket.linger = 0
        self._outbox.bind(self._process.to_engine)
        self._inbox.bind(self._process.from_engine)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_other)
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._dead = asyncio.Event()
        self._death = "the engine process ended"
        self._closing = False
        self._draining = False
        self._streams: dict[str, _Stream] = {}
        self._embeds: dict[int, asyncio.Future[np.ndarray]] = {}
        self._stats = EngineStats()
        self._receiver: asyncio.Task | None = None
        self._collector: Collector | None = None

    @classmethod
    async def start(cls, config: EngineConfig) -> AsyncEngine:
        """Start the engine process and wait until it is ready.

        Raises the error that kept it from starting (ConfigError, CheckpointError, DeviceError, ...), with its message.
        """
        engine = cls()
        try:
            await engine._start(config)
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _start(self, config: EngineConfig) -> None:
        from zhilight.engine.llm import load_tokenizer_of

        self._process.spawn()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, args=(loop,), name="engine-watcher", daemon=True).start()
        await self._send_first(Start(config, logging.getLogger("zhilight").getEffectiveLevel()))
        loading = asyncio.ensure_future(asyncio.to_thread(load_tokenizer_of, config))
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # raised below, if at all
        ready = await self._first_answer()
        self.config, self.model_config, self.max_model_len = ready.config, ready.model_config, ready.max_model_len
        self.tokenizer = await loading
        self._collector = Collector(self.tokenizer)
        self._stats.kv_blocks = ready.num_kv_blocks
        self._receiver = asyncio.create_task(self._receive())
        self._receiver.add_done_callback(self._on_receiver_end)

    # ---- requests ---------------------------------------------------------------------------------------------

    async def generate(self, prompt_token_ids: list[int], params: SamplingParams, request_id: str, *, prompt: str | None = None,
                       priority: int = 0, cache_salt: str | None = None) -> AsyncIterator[RequestOutput]:
        """Yield what is new until the request has finished. Closing the iterator, or cancelling its task, aborts it.

        Raises, before the first item: RequestError when it cannot be served as asked, EngineBusy when too many wait or the
        engine is shutting down; EngineDead at any time.
        """
        self._check_accepting()
        array = validate_prompt(prompt_token_ids, params, self.config, self.model_config)
        if request_id in self._streams:
            raise RequestError(f"request_id {request_id!r} is already running; each request needs its own.", param="request_id")
        self._check_room(params.num_sequences)
        bad_words = self._collector.bad_word_ids(params)
        request = self._collector.open(request_id, prompt, list(prompt_token_ids), params)
        stream = self._streams[request_id] = _Stream(request)
        try:
            for message in request.messages(array, priority, cache_salt, bad_words):
                self._send(message)
            while True:
                await stream.news.wait()
                stream.news.clear()
                if request.refused is not None:
                    raise request.refused
                if request.has_news:
                    output = request.take()
                    yield output
                    if output.finished:
                        return
                if self._dead.is_set():
                    raise EngineDead(f"request {request_id} cannot finish: {self._death}.")
        finally:
            self._streams.pop(request_id, None)
            self._forget(request)

    async def abort(self, request_id: str) -> None:
        """End a request: its iterator gets what there is, with finish_reason "abort". Idempotent, unknown ids are fine."""
        stream = self._streams.get(request_id)
        if stream is not None:
            self._forget(stream.request)
            stream.news.set()

    async def embed(self, prompt_token_ids: list[int]) -> np.ndarray:
        """The last hidden state, after the final norm, of the prompt's last token: [H] float32.

        Raises as `generate` does, and RuntimeError when the computation fails. Cancelling the task aborts it.
        """
        self._check_accepting()
        array = validate_embedding(prompt_token_ids, self.config, self.model_config)
        self._check_room(1)
        handle = self._collector.next_handle()
        future = self._embeds[handle] = asyncio.get_running_loop().create_future()
        try:
            self._send(Embed(handle, array.tobytes()))
            return await future
        finally:
            del self._embeds[handle]
            if future.cancelled():
                self._send_if_alive(Abort([handle]))

    def stats(self) -> EngineStats:
        """The gauges and counters that the engine sent last, at most a fraction of a second old while it works."""
        return self._stats

    # ---- life cycle -------------------------------------------------------------------------------------------

    @property
    def dead(self) -> asyncio.Event:
        """Set as soon as the engine process has ended, for whatever reason."""
        return self._dead

    @property
    def pid(self) -> int | None:
        """The engine process."""
        return self._process.pid

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and let those that run finish, at most `timeout` seconds; then abort what is left."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + timeout
        while (self._streams or self._embeds) and not self._dead.is_set():
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                logger.warning("%d requests still run after %.1f s: they are aborted", len(self._streams), timeout)
                for request_id in list(self._streams):
                    await self.abort(request_id)
                return
            await asyncio.sleep(min(left, 0.05))

    async def close(self) -> None:
        """End the engine process now and free everything. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self._send_if_alive(Shutdown())
        # an engine that still loads reads no messages: it need not be waited for
        await asyncio.to_thread(self._process.end, _PATIENCE if self._receiver is not None else _PATIENCE_AT_START)
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.wait({self._receiver})  # raises nothing: `_on_receiver_end` has said what there is to say
        self._on_death("it was closed")
        self._outbox.close()
        self._inbox.close()
        self._context.term()

    # ---- details ----------------------------------------------------------------------------------------------

    def _check_accepting(self) -> None:
        if self._dead.is_set():
            raise EngineDead(f"the engine is gone: {self._death}. Restart the server.")
        if self._draining or self._closing:
            raise EngineBusy("the server is shutting down and takes no new requests.", retry_after=5.0)

    def _check_room(self, count: int) -> None:
        waiting, limit = self._collector.num_waiting + len(self._embeds), self.config.max_waiting
        if waiting + count > limit:
            raise EngineBusy(f"{waiting} sequences wait already and max_waiting is {limit}; {count} more do not fit. "
                             "Try again later.")

    def _forget(self, request: CollectedRequest) -> None:
        handles = self._collector.close(request)
        if handles:
            self._send_if_alive(Abort(handles))

    def _send(self, message: msgspec.Struct) -> None:
        try:
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineDead(f"the engine cannot be reached: {self._death}.") from None

    def _send_if_alive(self, message: msgspec.Struct) -> None:
        if not self._dead.is_set():
            with contextlib.suppress(zmq.ZMQError):
                self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _send_first(self, message: msgspec.Struct) -> None:
        """Send when the child has connected."""
        data = self._encoder.encode(message)
        while not self._dead.is_set():
            try:
                self._outbox.send(data, zmq.NOBLOCK)
                return
            except zmq.Again:
                await asyncio.sleep(0.01)

    async def _first_answer(self) -> Ready:
        answer = asyncio.ensure_future(self._inbox.recv())
        death = asyncio.ensure_future(self._dead.wait())
        await asyncio.wait((answer, death), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            await asyncio.wait((answer,), timeout=0.5)  # its last words may still be on the way
        death.cancel()
        if not answer.done():
            answer.cancel()
            raise EngineDead(f"the engine process ended while it started: {self._process.exit_reason()}. Its log says more.")
        message = self._decoder.decode(answer.result())
        if isinstance(message, Ready):
            return message
        raise _error_of(message)

    async def _receive(self) -> None:
        while True:
            message = self._decoder.decode(await self._inbox.recv())
            if isinstance(message, StepOutput):
                self._take_in(message)
            elif isinstance(message, Failed):
                self._death = f"{message.kind}: {message.message}"

    def _on_receiver_end(self, receiver: asyncio.Task) -> None:
        """Nobody reads the engine's messages any more: without this, every request would wait for ever."""
        if not receiver.cancelled() and (error := receiver.exception()) is not None:
            logger.error("The engine's messages cannot be read any more: %s", error, exc_info=error)
            self._death = f"its messages cannot be read ({type(error).__name__}: {error})"
            self._on_death("the front failed")

    def _take_in(self, out: StepOutput) -> None:
        if out.stats is not None:
            self._stats = out.stats
        touched, stopped = self._collector.dispatch(out)
        if stopped:
            self._send_if_alive(Abort(stopped))
        for request in touched:
            stream = self._streams.get(request.request_id)
            if stream is not None and stream.request is request:
                stream.news.set()
        for handle, data in out.embeddings:
            future = self._embeds.get(handle)
            if future is not None and not future.done():
                future.set_result(np.frombuffer(data, np.float32))
        for finished in out.finished:
            future = self._embeds.get(finished.handle)
            if future is not None and not future.done():
                future.set_exception(RuntimeError(f"the embedding failed in the engine: {finished.error or finished.reason}"))

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """In a thread: wait for the child's end, and say so to the loop."""
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            loop.call_soon_threadsafe(loop.call_later, 0.05, self._on_death, self._process.exit_reason())

    def _on_death(self, reason: str) -> None:
        if self._dead.is_set():
            return
        if self._death.startswith("the engine process"):
            self._death = f"the engine process ended: {reason}"
        if not self._closing:
            logger.error("%s; %d requests cannot finish", self._death, len(self._streams))
        self._dead.set()
        for stream in self._streams.values():
            stream.news.set()
        for future in self._embeds.values():
            if not future.done():
                future.set_exception(EngineDead(self._death))


def _error_of(failed: Failed) -> ZhiLightError:
    """The error a starting engine reported, of its own class where that is one of ours."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, ZhiLightError):
        return kind(failed.message)
    return EngineDead(f"the engine could not start: {failed.kind}: {failed.message}")
