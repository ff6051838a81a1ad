"""Resharding over gloo, 4 trainer's ranks to 4 of one engine: `p2p` by the plan beside gather-then-broadcast.

    OMP_NUM_THREADS=1 python benchmarks/transfer/reshard.py OUT.json [--mb 150] [--repeats 5]

The trainer's ranks hold rows of every tensor, the engine's columns, each rank in a process of its own. The other way
is the usual one, in plain torch.distributed: rank 0 gathers a tensor whole, then broadcasts it to every rank of the
engine, which keeps its slice.

Bytes are counted where a tensor is handed to a collective call, in every process, not taken from any report: of `p2p`
at the group's send and recv, of the other at gather and broadcast (a broadcast is counted at each receiver). The plan's
bytes must be those of `p2p`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import setting
import torch
import torch.distributed as dist

from powertrain.launch.ports import free_port

TRAINER, ENGINE = 4, 4
COUNTED: dict[str, int] = {}


def count_calls(rank: object) -> None:
    """Count from now on, in this process, what goes through every call of gloo that carries a tensor."""

    def wrap(owner, name, data):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            COUNTED[name] = COUNTED.get(name, 0) + data(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, counted)

    for name in ("send", "recv"):
        wrap(dist.ProcessGroupGloo, name, lambda group, tensors, *rest: sum(tensor.nbytes for tensor in tensors))
    wrap(dist, "gather", lambda tensor, parts=None, **more: 0 if parts else tensor.nbytes)
    wrap(dist, "broadcast", lambda tensor, src, **more: 0 if dist.get_rank() == src else tensor.nbytes)


def counted(rank: object) -> dict[str, int]:
    """Return what was counted since the last call."""
    found = dict(COUNTED)
    COUNTED.clear()
    return found


class Plain:
    """The groups of the other way in one process."""

    groups: tuple[object, object] | None = None


def join(rank: object, number: int, port: int) -> None:
    """Join torch's default group, and make one of the trainer and one of rank 0 with the engine."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=TRAINER + ENGINE)
    Plain.groups = dist.new_group(list(range(TRAINER))), dist.new_group([0, *range(TRAINER, TRAINER + ENGINE)])


def gather_broadcast(rank: setting.Rank) -> float:
    """Move all tensors the other way; returns seconds up to a barrier of all ranks."""
    trainers, receivers = Plain.groups
    number, weights = dist.get_rank(), rank.weights
    dist.barrier()
    begun = time.perf_counter()
    for entry in weights.manifest():
        mine = weights.tensors()[entry.name]
        whole = torch.empty(entry.shape, dtype=torch.bfloat16) if number == 0 or number >= TRAINER else None
        if number < TRAINER:
            parts = list(whole.chunk(TRAINER)) if number == 0 else None
            dist.gather(mine, parts, dst=0, group=trainers)
        if whole is not None:
            dist.broadcast(whole, 0, group=receivers)
        if number >= TRAINER:
            [box] = entry.boxes
            mine.copy_(whole[tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))])
    dist.barrier()
    return time.perf_counter() - begun


def leave(rank: object) -> None:
    """Leave torch's groups."""
    dist.destroy_process_group()


def shapes_of(size: int) -> dict[str, tuple[int, ...]]:
    """Return matrices, of a small model's shapes, that 4 ranks share evenly: `gather` takes no other."""
    return {name: shape for name, shape in setting.like_model(size).items() if len(shape) == 2}


async def run(size: int, repeats: int) -> dict[str, object]:
    """Take both ways in turn and return what was seen."""
    shapes = shapes_of(size)
    world = setting.World("p2p", shapes, trainer=TRAINER, engine=ENGINE)
    ranks = [*world.source.ranks, *world.sink.ranks]

    async def on_all(function, *args_of):
        loop, commands = (
            asyncio.get_running_loop(),
            [(function, *(args[i] for args in args_of)) for i in range(len(ranks))],
        )
        return await asyncio.gather(
            *(
                loop.run_in_executor(setting.THREADS, one.call, "run", args)
                for one, args in zip(ranks, commands, strict=True)
            )
        )

    def total(counts):
        return {name: sum(one.get(name, 0) for one in counts) for name in ("send", "recv", "gather", "broadcast")}

    await world.start()
    port = free_port()
    await on_all(count_calls)
    await on_all(join, range(len(ranks)), [port] * len(ranks))
    plan = await world.transfer.plan(world.source, [world.sink], deadline=300.0)
    planned = sum(plan.pairs().values())
    p2p, other, bytes_p2p, bytes_other, phases = [], [], [], [], []
    first, _ = await world.push()
    await on_all(gather_broadcast)
    await on_all(counted)
    for _ in range(repeats):
        seconds, report = await world.push()
        p2p.append(seconds)
        phases.append(dict(report.seconds))
        bytes_p2p.append(total(await on_all(counted)))
        other.append(max(await on_all(gather_broadcast)))
        bytes_other.append(total(await on_all(counted)))
    assert all(one["send"] == one["recv"] == planned for one in bytes_p2p), (bytes_p2p, planned)
    checksum = await world.check()
    await on_all(leave)
    await world.close()
    wire = [one["gather"] + one["broadcast"] for one in bytes_other]
    return {
        "bytes_of_the_model": setting.bytes_of(shapes),
        "tensors": len(shapes),
        "ranks": {"trainer": TRAINER, "engine": ENGINE},
        "bytes_of_the_plan": planned,
        "bytes_counted_p2p": bytes_p2p,
        "bytes_counted_gather_broadcast": bytes_other,
        "bytes_ratio": statistics.median(wire) / planned,
        "first_seconds_p2p": first,
        "seconds_p2p": p2p,
        "phases_median_seconds_p2p": {name: statistics.median(row[name] for row in phases) for name in phases[0]},
        "seconds_gather_broadcast": other,
        "median_seconds": {"p2p": statistics.median(p2p), "gather_broadcast": statistics.median(other)},
        "times_faster": statistics.median(other) / statistics.median(p2p),
        "checksum_after_update": checksum,
    }


def main() -> None:
    """Run and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mb", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    result = setting.head("reshard.py", "setting.py") | asyncio.run(run(args.mb * 10**6, args.repeats))
    setting.write(args.out, result)
    for name in ("bytes_of_the_plan", "bytes_ratio", "median_seconds", "times_faster", "phases_median_seconds_p2p"):
        print(name, result[name])
    print(result["bytes_counted_p2p"][0], result["bytes_counted_gather_broadcast"][0])


if __name__ == "__main__":
    main()
