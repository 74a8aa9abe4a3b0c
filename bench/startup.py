"""From the start of a process to its first token, in parts: the interpreter, the imports, the engine, the first token.

    python bench/startup.py                        # the demo model on whatever hardware is here
    python bench/startup.py --model FOLDER --runs 5

Each run is a process of its own; the files are in the system's cache after the first, which is not counted. Prints the median
wall seconds of each part, and the CPU seconds of the whole (user and system, all threads).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time

CHILD = """
import json, resource, sys, time
arguments = json.loads(sys.argv[1])
marks = [time.time()]
from zhilight import LLM, SamplingParams
marks.append(time.time())
llm = LLM(arguments["model"], device=arguments["device"])
marks.append(time.time())
for output in llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=1)):
    marks.append(time.time())
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"marks": marks, "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss / 1024}))
"""
PARTS = ("interpreter", "imports", "engine", "first token")


def run(arguments: argparse.Namespace) -> tuple[list[float], float, float]:
    """(seconds of each part, CPU seconds, peak MiB) of one process."""
    begin = time.time()
    settings = json.dumps({"model": arguments.model, "device": arguments.device})
    child = subprocess.run([sys.executable, "-c", CHILD, settings], stdout=subprocess.PIPE, check=True, text=True)
    result = json.loads(child.stdout.splitlines()[-1])
    times = [begin, *result["marks"][:4]]
    return [b - a for a, b in itertools.pairwise(times)], result["cpu"], result["peak"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    run(arguments)
    runs = [run(arguments) for _ in range(arguments.runs)]
    for number, part in enumerate(PARTS):
        print(f"{part:<14}{statistics.median(parts[number] for parts, _, _ in runs):6.2f} s")
    print(f"{'together':<14}{statistics.median(sum(parts) for parts, _, _ in runs):6.2f} s")
    print(f"{'CPU':<14}{statistics.median(cpu for _, cpu, _ in runs):6.2f} s")
    print(f"{'peak memory':<14}{statistics.median(peak for _, _, peak in runs):6.0f} MiB")


if __name__ == "__main__":
    main()
