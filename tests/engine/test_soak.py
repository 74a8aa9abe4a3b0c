"""Twenty seconds of bench/soak.py: random load, aborts and bad requests, and nothing left over at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_soak_of_twenty_seconds():
    done = subprocess.run([sys.executable, str(ROOT / "bench" / "soak.py"), "--seconds", "20"], capture_output=True, text=True,
                          timeout=150, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "soak passed" in done.stdout
