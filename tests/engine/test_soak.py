"""The engine's benches as CI runs them: twenty seconds of soak, and a short look at the scheduler's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_bench(name: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, str(ROOT / "bench" / name), *arguments], capture_output=True, text=True, timeout=150,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_soak_of_twenty_seconds():
    """Random load, aborts and bad requests, and nothing left over at the end."""
    assert "soak passed" in run_bench("soak.py", "--seconds", "20")


def test_the_scheduler_bench_runs():
    line = run_bench("scheduler.py", "--running", "256", "--steps", "200")
    steps = float(line.split("steps: ")[1].split()[0])
    assert steps > 400, "five times slower than the 2000 steps/s it must reach on a quiet machine"
