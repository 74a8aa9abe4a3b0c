"""Steps a second of the engine loop alone: the model is a stub that answers at once.

    python bench/scheduler.py --running 256 --steps 4000

Everything but the device is there: scheduling, KV blocks, the step's arrays, sampling parameters, stop checks, prefix
hashes of generated blocks, the output message, encoded.
"""

from __future__ import annotations

import argparse
import time

import msgspec
import numpy as np

from zhilight.config.sampling import SamplingParams
from zhilight.engine.batch import SlotTable
from zhilight.engine.block_pool import BlockPool
from zhilight.engine.core import EngineCore
from zhilight.engine.messages import Add
from zhilight.engine.runner import Runner
from zhilight.engine.sampler import Sampler
from zhilight.engine.scheduler import Scheduler
from zhilight.ops.base import Fetch, SampleResult
from zhilight.ops.cpu import CpuOps

VOCAB = 128_000


class _Later(Fetch):
    def __init__(self, array: np.ndarray):
        self._array = array

    def wait(self) -> np.ndarray:
        return self._array

    def ready(self) -> bool:
        return False


class StubOps(CpuOps):
    """Takes the step's arrays as they are, and samples nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = np.random.default_rng(0)

    def prepare_step(self, arrays, sampled=None):
        return arrays

    def sample(self, logits, batch):
        return SampleResult(self._rng.integers(10, VOCAB, len(batch.temperature), np.int32))

    def fetch(self, source):
        return _Later(source)


class StubModel:
    def forward(self, step, kv_cache):
        return np.empty((len(step.logit_rows), 1), np.float32)


def build(running: int, prompt: int, output: int, block_size: int, overlap: bool) -> EngineCore:
    ops = StubOps()
    length = prompt + output
    table = SlotTable(running, length, block_size)
    pool = BlockPool(running * -(-length // block_size), block_size)
    scheduler = Scheduler(pool, table, max_num_batched_tokens=8192, eos_token_ids=(2,))
    return EngineCore(Runner(StubModel(), ops, [], Sampler(ops, table, VOCAB, (2,))), scheduler, enable_overlap=overlap)


def measure(running: int, steps: int, prompt: int, output: int, block_size: int, overlap: bool) -> dict[str, float]:
    """Keeps `running` sequences running for `steps` steps, replacing each that ends; figures of the steps."""
    core = build(running, prompt, output, block_size, overlap)
    encoder = msgspec.msgpack.Encoder()
    rng = np.random.default_rng(1)
    handle = 0

    def feed(count: int) -> None:
        nonlocal handle
        for _ in range(count):
            handle += 1
            params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=int(rng.integers(output // 2, output + 1)))
            core.add(Add(handle, rng.integers(10, VOCAB, prompt).astype(np.int32).tobytes(), params, 0.0))

    feed(running)
    while core.scheduler.waiting:
        feed(len(core.step().finished))
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        out = core.step()
        encoder.encode(out)
        times.append(time.perf_counter() - begin)
        feed(len(out.finished))
    times = np.array(times)
    return {"steps/s": steps / times.sum(), "mean us": 1e6 * times.mean(), "median us": 1e6 * np.median(times),
            "p99 us": 1e6 * np.quantile(times, 0.99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--no-overlap", action="store_true")
    arguments = parser.parse_args()
    figures = measure(arguments.running, arguments.steps, arguments.prompt, arguments.output, arguments.block_size,
                      not arguments.no_overlap)
    print(f"{arguments.running} running, {arguments.steps} steps: "
          + ", ".join(f"{value:.0f} {name}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
