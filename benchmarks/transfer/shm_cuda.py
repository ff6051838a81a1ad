"""The transfer `shm` between two processes with weights on one CUDA card, its staging area pinned and not.

    python benchmarks/transfer/shm_cuda.py OUT.json [--gb 4.06] [--repeats 15]

Made-up weights, bfloat16. In the same run, in this process: copies of the same bytes from the card into pinned memory
and back, each alone; an update is both, one beside the other, so the slower of them is its limit. Then a step, one more
update, and a checksum of every tensor on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

import setting
import torch

from powertrain.tensors.area import Area
from powertrain.tensors.shm import SLOTS, ShmTransfer


def do_not_pin(rank: object) -> None:
    """Leave the area as it is from now on, in this process."""
    Area.pin = lambda area, device: None


def plain(size: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of copies from the card and back, through 1 GiB of pinned memory."""
    card = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    found: dict[str, list[float]] = {"from_card": [], "to_card": []}
    for _ in range(repeats):
        for name, (target, source) in {"from_card": (host, card), "to_card": (card, host)}.items():
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for begin in range(0, size, 1 << 30):
                count = min(1 << 30, size - begin)
                target[:count].copy_(source[:count], non_blocking=True)
            torch.cuda.synchronize()
            found[name].append(time.perf_counter() - begun)
    return found


async def measure(shapes: setting.Shapes, repeats: int, *, pinned: bool, bucket_mb: int) -> dict[str, object]:
    """Take updates, with the area pinned or not."""
    world = setting.World("shm", shapes, options={"bucket_mb": bucket_mb}, device="cuda")
    if not pinned:
        for handle in (world.source, world.sink):
            await handle.call("run", do_not_pin, deadline=300.0)
    return {"bucket_mb": bucket_mb, **await world.measure(repeats)}


def main() -> None:
    """Run and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gb", type=float, default=4.06)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    shapes = setting.like_model(int(args.gb * 1e9), hidden=2048)
    result = setting.head("shm_cuda.py", "setting.py") | {"card": torch.cuda.get_device_name(0)}
    result |= {"bytes": setting.bytes_of(shapes), "tensors": len(shapes), "slots": SLOTS}
    copies = plain(setting.bytes_of(shapes), args.repeats)
    medians = {name: statistics.median(seconds) for name, seconds in copies.items()}
    result |= {"plain_copy_seconds": copies, "plain_copy_median_seconds": medians}
    torch.cuda.empty_cache()
    buckets = dict.fromkeys((ShmTransfer.BUCKET_MB, 32, 128, 512))
    for bucket_mb in buckets:
        result[f"pinned_{bucket_mb}_mb"] = asyncio.run(measure(shapes, args.repeats, pinned=True, bucket_mb=bucket_mb))
    result["not_pinned"] = asyncio.run(measure(shapes, args.repeats, pinned=False, bucket_mb=ShmTransfer.BUCKET_MB))
    best = result[f"pinned_{ShmTransfer.BUCKET_MB}_mb"]["median_seconds"]
    result["pinned_to_slower_plain_copy"] = best / max(medians.values())
    setting.write(args.out, result)
    for name, row in result.items():
        if isinstance(row, dict) and "median_seconds" in row:
            print(name, row["first_seconds"], row["median_seconds"], row["gb_per_s"], row["phases_median_seconds"])
    print(medians, result["pinned_to_slower_plain_copy"])


if __name__ == "__main__":
    main()
