"""The engine process takes what it has started along when it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from zhilight.engine.process import EngineProcess

ROOT = str(Path(__file__).resolve().parents[2])
CHILD = """
import subprocess, sys
print(subprocess.Popen(["sleep", "100"]).pid, flush=True)
from zhilight.engine.process import _end_with_parent
_end_with_parent(sys.argv[1])
"""


def start(folder: Path) -> tuple[subprocess.Popen, int]:
    """A stand-in for the engine, as `EngineProcess.spawn` starts it, and the process that it has started."""
    folder.mkdir()
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             start_new_session=True, env={"PYTHONPATH": ROOT, "PATH": "/usr/bin:/bin"})
    return child, int(child.stdout.readline())


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ended(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not runs(pid)


def test_a_child_that_does_not_end_is_killed_with_its_own(tmp_path):
    process = EngineProcess()
    process._child, grandchild = start(tmp_path / "sockets")
    assert runs(grandchild)
    process.end(patience=0.1)
    assert process.exit_reason() == "it was ended by SIGKILL"
    assert ended(grandchild)
    process._child.stdout.close()


def test_all_end_with_the_parent(tmp_path):
    child, grandchild = start(tmp_path / "sockets")
    child.stdin.close()
    child.wait(5)
    child.stdout.close()
    assert ended(grandchild)
    assert not (tmp_path / "sockets").exists()
