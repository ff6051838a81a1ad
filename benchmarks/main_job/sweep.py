"""Find TRL's best settings for the job, so that run.py compares with them.

    python benchmarks/main_job/sweep.py --trl-python .venvs/trl/bin/python [--by cpu]

Batch sizes first, then every other setting at the best of them, then all that helped by one per cent together. Every
setting keeps the result's definition: samples of a step, lengths, sampling, loss, optimizer, float32, threads. Writes
benchmarks/results/main_job_sweep.json, whose `best` run.py reads. About 12 minutes on 2 idle cores.
"""

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import tempfile
from pathlib import Path
from statistics import median

from job import ROOT, start_theirs
from pace import Lost

RESULT = ROOT / "benchmarks" / "results" / "main_job_sweep.json"
BATCHES = (8, 16, 32, 64, 128)
OTHERS = (
    {"attention": "eager"},
    {"cache_implementation": "static"},
    {"use_transformers_continuous_batching": True},
    {"gradient_checkpointing": True},
    {"torch_compile": True},
    {"allocator": False},
)
GAIN = 0.99


def measure(settings, args, folder):
    """Return seconds of a step, or what went wrong."""
    side = start_theirs(
        args.trl_python, 0, args.steps + 1, forced=True, settings={**settings, "threads": args.threads}, folder=folder
    )
    try:
        side.facts(args.limit)
        side.step(args.limit)  # fills caches, compiles
        steps = [side.step(args.limit) for _ in range(args.steps)]
    except Lost as exc:
        return {"settings": settings, "failed": str(exc)}
    finally:
        with contextlib.suppress(OSError):
            side.end(10)
    return {
        "settings": settings,
        "wall": round(median(step["seconds"] for step in steps), 3),
        "cpu": round(median(step["cpu_seconds"] for step in steps), 3),
        "generate": round(median(step["generate"] for step in steps), 3),
        "train": round(median(step["train"] for step in steps), 3),
        "peak_rss_gib": round(max(step["peak_rss_bytes"] for step in steps) / 2**30, 2),
        "load_1min": [step["load_1min"] for step in steps],
    }


def search(args, folder, kept):
    """Return all rows and the best of them; kept: rows of an earlier sweep, which are not measured again."""
    rows = []

    def best():
        return min((row for row in rows if "failed" not in row), key=lambda row: row[args.by])

    def note(settings):
        old = next((row for row in kept if row["settings"] == settings and "failed" not in row), None)
        rows.append(old or measure(settings, args, folder))
        print(json.dumps(rows[-1]), flush=True)
        write(args, rows, best() if any("failed" not in row for row in rows) else None)
        return rows[-1]

    for size in args.batches:
        note({"allocator": True, "per_device_train_batch_size": size})
    base = best()
    helped = {}
    for change in OTHERS:
        row = note({**base["settings"], **change})
        if row.get(args.by, float("inf")) < GAIN * base[args.by]:
            helped |= change
    if len(helped) > 1:
        note({**base["settings"], **helped})
    return best()


def write(args, rows, best):
    """Write what is known so far."""
    document = {
        "benchmark": "main_job_sweep",
        "date": f"{datetime.date.today()}",
        "unit": "seconds of a step, wall clock and CPU (all threads); forced lengths as in run.py",
        "chosen_by": args.by,
        "threads": args.threads,
        "versions": versions(args.trl_python),
        "best": best,
        "rows": rows,
    }
    args.output.write_text(json.dumps(document, indent=1) + "\n")


def versions(python):
    """Return the versions in TRL's environment."""
    names = ("trl", "torch", "transformers", "accelerate", "datasets")
    code = f"import json; from importlib.metadata import version as v; print(json.dumps({{n: v(n) for n in {names}}}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main():
    """Search, write, print the best."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venvs/trl/bin/python")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=1, help="measured steps of each setting, behind one that warms up")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--by", choices=("wall", "cpu"), default="wall", help="cpu: on a machine that others load")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a step; longer is a failure")
    parser.add_argument("--keep", action="store_true", help="go on with a sweep that was broken off")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    kept = json.loads(args.output.read_text())["rows"] if args.keep and args.output.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        best = search(args, Path(folder), kept)
    print(f"best: {json.dumps(best)}")


if __name__ == "__main__":
    main()
