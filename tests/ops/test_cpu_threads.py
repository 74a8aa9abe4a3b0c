"""The CPU backend's threads: every piece once, errors come back, the same numbers whoever computes them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from zhilight.ops.cpu_threads import Threads


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_piece_runs_once_and_before_run_returns(size):
    threads = Threads(size)
    for pieces in (0, 1, 2, 7, 100):
        done = np.zeros(pieces, np.int64)

        def work(i, done=done):
            time.sleep(0.0001)
            done[i] += 1

        threads.run(work, range(pieces))
        assert (done == 1).all()


def test_workers_take_part():
    threads, names = Threads(3), set()
    barrier = threading.Barrier(3, timeout=30)  # passes only when three threads are in it at once

    def work(_):
        barrier.wait()
        names.add(threading.current_thread().name)

    threads.run(work, range(3))
    assert len(names) == 3


def test_the_caller_does_not_wait_for_a_worker_that_is_held_up():
    """A worker busy with another caller's long piece must not delay a task that the caller can do alone."""
    threads, release, begun = Threads(2), threading.Event(), threading.Event()

    def long(piece):
        if threading.current_thread().name.startswith("cpu-ops"):
            begun.set()
            release.wait(30)
        else:
            begun.wait(30)  # leave the other piece to the worker

    other = threading.Thread(target=threads.run, args=(long, range(2)))
    other.start()
    assert begun.wait(30)
    done = []
    threads.run(done.append, range(10))
    assert sorted(done) == list(range(10))
    assert not release.is_set()
    release.set()
    other.join(30)
    assert not other.is_alive()


def test_an_error_comes_back_after_all_pieces_have_ended():
    threads, done = Threads(2), []

    def work(i):
        if i == 3:
            raise ValueError("piece 3")
        done.append(i)

    with pytest.raises(ValueError, match="piece 3"):
        threads.run(work, range(8))
    assert sorted(done) == [0, 1, 2, 4, 5, 6, 7]
    threads.run(done.append, [8])  # and the threads go on
    assert 8 in done


@pytest.mark.parametrize(("m", "k", "n"), [(1, 600, 5000), (7, 512, 3001), (130, 640, 2048), (3, 8, 8)])
def test_products_are_right_and_do_not_depend_on_who_computes_them(m, k, n):
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32)
    threads, out = Threads(2), np.full((m, n), np.nan, np.float32)
    threads.matmul(x, weight, out)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    assert np.abs(out - exact).max() < 1e-3
    for _ in range(20):
        again = np.full((m, n), np.nan, np.float32)
        threads.matmul(x, weight, again)
        assert (again == out).all()


def test_blas_leaves_the_cores_to_them():
    """In a process of its own: BLAS's number of threads is taken over, and a product then runs on one thread."""
    script = ("from zhilight.ops import cpu_threads as t; library = t._openblas(); before = library[0]() if library else 1; "
              "threads = t.shared_threads(); assert threads is t.shared_threads(); "
              "assert threads.size == before, (threads.size, before); assert library is None or library[0]() == 1")
    subprocess.run([sys.executable, "-c", script], check=True, env={"OPENBLAS_NUM_THREADS": "2", "PATH": "/usr/bin"})
