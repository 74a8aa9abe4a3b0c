"""Processes that compile kernels, several at once.

They are not multiprocessing's: those import the program's main module again, so that a script which makes an engine at its top
level would make one in each of them. These import the kernels alone, and end when their input does: with the program, whatever
ends it.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any

from zhilight.errors import DeviceError


class CompileWorkers:
    """`count` processes; a context manager. Each call goes to one that is idle."""

    def __init__(self, count: int):
        self._workers = [_Worker() for _ in range(count)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(count, "compile")

    def submit(self, function: Any, *arguments: Any) -> Future:
        """function(*arguments) in a worker; all three, and the result, are pickled. Raises DeviceError if the worker dies."""
        return self._threads.submit(self._run, (function, arguments))

    def _run(self, task: tuple[Any, tuple]) -> Any:
        worker = self._idle.get()
        try:
            return worker.run(task)
        finally:
            self._idle.put(worker)

    def __enter__(self) -> CompileWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            for worker in self._workers:
                worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


class _Worker:
    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment)

    def run(self, task: tuple[Any, tuple]) -> Any:
        try:
            pickle.dump(task, self.process.stdin)
            self.process.stdin.flush()
            result, error = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as fault:
            raise DeviceError(f"a process that compiles kernels ended with exit code {self.process.wait()}; -9 is what the "
                              "system gives when memory runs out.") from fault
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):  # what was still to be flushed has no reader
                stream.close()
        self.process.wait()


def serve() -> None:
    """A worker's life: tasks from standard input, results to standard output, until the input ends."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print must not mix with the results
    while True:
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = function(*arguments), None
        except Exception as error:
            answer = None, error
        pickle.dump(answer, results)
        results.flush()
