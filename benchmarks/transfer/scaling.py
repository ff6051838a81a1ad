"""Time of an update against the size of the model and the number of its tensors, for `local`, `shm`, `p2p` and `disk`.

    OMP_NUM_THREADS=1 python benchmarks/transfer/scaling.py OUT.json [--transfers shm] [--sizes 0.1,1] [--counts 100]

Made-up weights, bfloat16, one trainer's rank and one of the engine, in two processes (`local`: in one). Sizes are GB in
tensors of a small model's shapes; counts are numbers of equal tensors of together `--fixed` GB. The first update, which
asks for manifests, plans, and tells both sides, is told apart from later ones. The slope over counts is the cost of a
tensor. A size that does not fit into memory, or on disk, is left out and named.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import setting
import torch

KINDS = ("local", "shm", "p2p", "disk")
SIZES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
COUNTS = (100, 1000, 5000, 20000)
SPARE = 2.5e9
"""Bytes of memory that are left to everybody else."""


def room() -> float:
    """Return the bytes of memory that may be had."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024


def misfit(kind: str, size: float) -> str:
    """Return why a size is left out, or nothing."""
    need = 2 * size + SPARE
    if need > room():
        return f"needs {need / 1e9:.1f} GB of memory, {room() / 1e9:.1f} are there"
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if kind == "disk" and 3 * size > free:  # the version before stays, and the next is written beside both
        return f"needs {3 * size / 1e9:.1f} GB on disk, {free / 1e9:.1f} are free"
    return ""


async def measure(kind: str, shapes: setting.Shapes, repeats: int) -> dict[str, object]:
    """Take a first update and some more."""
    world = setting.World(kind, shapes, options={"keep": 0} if kind == "disk" else None)
    return {"bytes": setting.bytes_of(shapes), "tensors": len(shapes), **await world.measure(repeats)}


def equal(count: int, size: float) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `count` equal tensors of together `size` bytes."""
    columns = 256
    return {f"layers.{n}.weight": (max(1, round(size / count / 2 / columns)), columns) for n in range(count)}


def slope(rows: list[dict[str, object]], over: str, of: str, factor: float) -> float | None:
    """Return the slope of a least-squares line, times a factor; None of fewer than two points."""
    if len(rows) < 2:
        return None
    line = np.polyfit([float(row[over]) for row in rows], [float(row[of]) for row in rows], 1)
    return round(float(line[0]) * factor, 4)


async def run(args: argparse.Namespace, result: dict[str, object]) -> None:
    """Take all sizes and counts of all transfers; what is there by then is written after each."""
    for kind in args.transfers.split(","):
        sizes, counts, left_out = [], [], []
        result["transfers"][kind] = {"against_size": sizes, "left_out": left_out, "against_count": counts}
        for size in map(float, filter(None, args.sizes.split(","))):
            if why := misfit(kind, size * 1e9):
                left_out.append({"gb": size, "why": why})
                print(kind, f"{size} GB left out: {why}", flush=True)
                continue
            sizes.append(await measure(kind, setting.like_model(int(size * 1e9)), args.repeats if size <= 2 else 3))
            note(args, result, kind, sizes[-1])
        for count in map(int, filter(None, args.counts.split(","))):
            counts.append(await measure(kind, equal(count, args.fixed * 1e9), args.repeats))
            note(args, result, kind, counts[-1])


def note(args: argparse.Namespace, result: dict[str, object], kind: str, row: dict[str, object]) -> None:
    """Fit the lines anew, write the file, print a row."""
    found = result["transfers"][kind]
    found["seconds_per_gb"] = slope(found["against_size"], "bytes", "median_seconds", 1e9)
    for name, of in (("", "median_seconds"), ("_first_update", "first_seconds")):
        found[f"microseconds_per_tensor{name}"] = slope(found["against_count"], "tensors", of, 1e6)
    setting.write(args.out, result)
    told = [found[name] for name in ("seconds_per_gb", "microseconds_per_tensor")]
    print(kind, line(row), "slopes: s/GB, us/tensor:", told, flush=True)


def line(row: dict[str, object]) -> str:
    """Return a row in short."""
    what = f"{row['bytes'] / 1e9:.2f} GB in {row['tensors']} tensors"
    phases = {name: round(seconds * 1e3, 1) for name, seconds in row["phases_median_seconds"].items()}
    return f"{what}: first {row['first_seconds']:.3f} s, then {row['median_seconds']:.4f} s {phases}"


def main() -> None:
    """Run and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--transfers", default=",".join(KINDS))
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)))
    parser.add_argument("--fixed", type=float, default=0.5, help="GB of all tensors, where their number varies")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = setting.head("scaling.py", "setting.py") | {"fixed_gb": args.fixed, "transfers": {}}
    asyncio.run(run(args, result))


if __name__ == "__main__":
    main()
