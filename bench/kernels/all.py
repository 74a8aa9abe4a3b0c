"""Every kernel bench in turn, each in a process of its own, with its records as JSON in one folder.

python bench/kernels/all.py --results bench/results/h200
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

BENCHES = ("gemm", "gemm_small", "gemm_sm80", "attention_prefill", "attention_decode", "small", "gemm_sustained")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", default="bench/results", help="folder of the JSON files")
    parser.add_argument("--only", nargs="*", choices=BENCHES, default=list(BENCHES))
    arguments = parser.parse_args()
    failed = []
    for name in arguments.only:
        print(f"== {name}", flush=True)
        script = Path(__file__).with_name(f"{name}.py")
        target = Path(arguments.results) / f"{name}.json"
        if subprocess.run([sys.executable, str(script), "--json", str(target)]).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
