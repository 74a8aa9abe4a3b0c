"""The engine process: `python -m zhilight.engine.process FOLDER`, started by `EngineProcess` and by nobody else.

It speaks msgpack over two sockets in a private folder. It sleeps in poll() while there is nothing to do, ignores SIGINT
and SIGTERM (its parent decides when it ends), and ends when its standard input closes, that is with its parent.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from zhilight.engine.core import EngineCore
from zhilight.engine.messages import Abort, Add, Embed, Failed, Ready, Start, StepOutput, ToEngine
from zhilight.engine.startup import start_engine
from zhilight.engine.stats_log import StatsLog
from zhilight.errors import ZhiLightError

logger = logging.getLogger(__name__)

STATS_PERIOD = 0.2
"""Seconds between two statistics in the messages to the front, while there is work."""
_LONGEST_FOLDER = 80
"""Characters: the address of a Unix socket has 107, its own name included."""


def encode_other(value: Any) -> Any:
    """For msgspec: NumPy numbers and arrays, which a checkpoint's metadata may hold."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


class EngineProcess:
    """The parent's handle of an engine process: its folder with the sockets' addresses, and the child itself."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self.folder = tempfile.mkdtemp(prefix="zhilight-", dir=base if len(base) < _LONGEST_FOLDER else "/tmp")
        self._child: subprocess.Popen | None = None

    @property
    def to_engine(self) -> str:
        return f"ipc://{self.folder}/to-engine"

    @property
    def from_engine(self) -> str:
        return f"ipc://{self.folder}/from-engine"

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def spawn(self) -> None:
        """Start the child. A session of its own keeps the terminal's Ctrl-C from it."""
        package = str(Path(__file__).resolve().parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._child = subprocess.Popen(
            [sys.executable, "-m", "zhilight.engine.process", self.folder], stdin=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})

    def wait(self) -> int:
        """Block until the child has ended; its exit code, negative for a signal."""
        return self._child.wait()

    def exit_reason(self) -> str:
        code = self._child.poll()
        if code is None:
            return "it still runs"
        return f"it was ended by {signal.Signals(-code).name}" if code < 0 else f"it exited with code {code}"

    def end(self, patience: float = 5.0) -> None:
        """Wait `patience` seconds for the child to end by itself, then kill it and what it has started. Removes the folder."""
        if self._child is not None:
            try:
                self._child.wait(patience)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):  # it has ended just now
                    os.killpg(self._child.pid, signal.SIGKILL)  # with the processes that compile kernels for it
                self._child.wait()
            self._child.stdin.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class EngineServer:
    """The child's loop between the sockets and the engine core."""

    def __init__(self, core: EngineCore, inbox: zmq.Socket, outbox: zmq.Socket, stats_interval: float):
        self._core = core
        self._inbox = inbox
        self._outbox = outbox
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_other)
        self._log = StatsLog(stats_interval)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        core.on_compiled = self._wake
        self._poller = zmq.Poller()
        self._poller.register(inbox, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._stats_sent = 0.0

    def run(self) -> None:
        """Until a Shutdown message."""
        core = self._core
        while True:
            if not core.has_work:
                self._sleep()
            if not self._receive():
                return
            if core.has_work:
                out = core.step()
                self._send(out)

    def _sleep(self) -> None:
        self._core.idle()
        for ready, _ in self._poller.poll():
            if ready == self._wake_read:
                os.read(self._wake_read, 4096)

    def _wake(self) -> None:
        """From the compiler's thread: end the sleep. A full pipe has woken it already."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b".")

    def _receive(self) -> bool:
        """Take in all messages that are there; False when it is time to end."""
        while True:
            try:
                message = self._decoder.decode(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            match message:
                case Add():
                    self._core.add(message)
                case Embed():
                    self._core.embed(message)
                case Abort():
                    self._core.abort(message)
                    if not self._core.has_work:
                        self._send(StepOutput())
                case _:
                    return False

    def _send(self, out: StepOutput) -> None:
        now = time.monotonic()
        if now - self._stats_sent >= STATS_PERIOD or not self._core.has_work:
            self._stats_sent = now
            out.stats = self._core.stats()
            self._log.offer(out.stats, now)
        if out.handles or out.finished or out.started or out.embeddings or out.prompt_logprobs or out.stats is not None:
            self._outbox.send(self._encoder.encode(out))


def main(folder: str) -> int:
    """Serve until told to stop; the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(folder,), name="parent", daemon=True).start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.rcvhwm = outbox.sndhwm = 0
    outbox.linger = 2000
    inbox.connect(f"ipc://{folder}/to-engine")
    outbox.connect(f"ipc://{folder}/from-engine")
    encoder = msgspec.msgpack.Encoder(enc_hook=encode_other)
    ready = False
    try:
        start = msgspec.msgpack.decode(inbox.recv(), type=ToEngine)
        if not isinstance(start, Start):
            return 0
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s[%(process)d]: %(message)s")
        logging.getLogger("zhilight").setLevel(start.log_level)
        engine = start_engine(start.config)
        gc.collect()
        gc.freeze()  # 100,000 objects that live as long as the process: each full collection took 50 ms between two steps
        outbox.send(encoder.encode(Ready(engine.config, engine.model_config, engine.max_model_len, engine.num_kv_blocks)))
        ready = True
        EngineServer(engine.core, inbox, outbox, start.config.stats_interval).run()
        engine.core.close()
        return 0
    except Exception as error:
        # A ZhiLightError says all there is to say, and at the start the front prints it. Anything else is a fault of ours.
        expected = isinstance(error, ZhiLightError)
        if ready or not expected:
            logger.error("The engine ends: %s", error, exc_info=None if expected else error)
        outbox.send(encoder.encode(Failed(_public_name(error), str(error))))
        return 1
    finally:
        outbox.close()
        inbox.close(0)
        context.term()


def _public_name(error: Exception) -> str:
    """The error's class, or the class of zhilight.errors that it derives from."""
    return next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == ZhiLightError.__module__),
                type(error).__name__)


def _end_with_parent(folder: str) -> None:
    """Standard input is a pipe from the parent: it ends when the parent does, however that happens."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # nobody else is left to do it
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # the processes that compile kernels would wait for this one for ever
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
