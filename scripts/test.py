"""Run every test of the repository, in each environment that tests/promises.toml names, one after another.

`make test` calls it with the Python of any environment; it needs nothing but Python. Each run prints its own closing
line; the last line of all has their sums, in pytest's form. All environments run, also after a failure; the exit
status is that of the first run that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ORDER = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")


def run(name: str, paths: list[str], jobs: str, started: float, tally: Path) -> int:
    """Run one environment's tests; returns pytest's exit status."""
    python = ROOT / ".venvs" / name / "bin" / "python"
    options = ["--whole", "--started", str(started), "--tally", str(tally), "-n", jobs, "--dist", "loadfile"]
    print(f"== tests in the environment {name}", flush=True)
    command = [str(python), "-m", "pytest", *options, "--no-loadscope-reorder", *paths]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "POWERTRAIN_TEST_ENVIRONMENT": name}).returncode


def closing(counts: Counter[str], seconds: float) -> str:
    """Return a closing line as pytest writes it."""
    words = [f"{counts[kind]} {kind}" for kind in ORDER if counts[kind]] or ["no tests ran"]
    return f"{', '.join(words)} in {seconds:.2f}s"


def main() -> int:
    """Run all; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", default="2", help="processes that run tests side by side")
    parser.add_argument("--started", type=float, default=time.time(), help="when the work began, in seconds since 1970")
    arguments = parser.parse_args()
    promises = tomllib.loads((ROOT / "tests" / "promises.toml").read_text(encoding="utf-8"))["environments"]
    counts: Counter[str] = Counter()
    ends = []
    with tempfile.TemporaryDirectory(prefix="powertrain-tests-") as folder:
        for name, about in promises.items():
            tally = Path(folder) / f"{name}.json"
            ends.append(run(name, about["paths"], arguments.jobs, arguments.started, tally))
            if tally.exists():
                counts.update(json.loads(tally.read_text()))
            else:
                counts["error"] += 1  # it broke off before its end
    print(f"== {', '.join(promises)} together, environments and lint included", flush=True)
    print(closing(counts, time.time() - arguments.started), flush=True)
    return next((end for end in ends if end), 0)


if __name__ == "__main__":
    sys.exit(main())
