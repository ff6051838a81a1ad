"""200 updates over each transfer, a failed or a cancelled one among every 20: nothing may add up in any process."""

import asyncio
import contextlib
import gc
import os
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from powertrain.errors import TransferError
from powertrain.tensors.area import PREFIX
from powertrain.tensors.disk import DiskTransfer
from powertrain.tensors.local import LocalTransfer
from powertrain.tensors.p2p import P2pTransfer
from powertrain.tensors.shm import ShmTransfer
from powertrain.weights import Update, WeightVersion

sys.path.append(str(Path(__file__).parent))
from transfer_world import SHAPES, Handle, Process, inline_sink, inline_source, pair, value

DEADLINE = 30.0
UPDATES, EVERY, WARM = 200, 20, 60
CLASSES = {"local": LocalTransfer, "shm": ShmTransfer, "p2p": P2pTransfer, "disk": DiskTransfer}
OPTIONS = {"local": {"share": "no"}, "shm": {"bucket_mb": 1}, "p2p": {"backend": "gloo", "bucket_mb": 1}}
OPTIONS["disk"] = {"keep": 1, "bucket_mb": 1}
BOUNDS = {"files": 0.02, "threads": 0.02, "mappings": 0.02, "kilobytes": 12.0}
"""The most that may be added per update, in the slope of a straight line."""


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Make a trainer and two engines, each in a process of its own, or (local) a trainer and one engine in this one.

    Their temporary folder is the test's.
    """
    started = []
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def make(kind):
        if kind == "local":
            return inline_source(), [inline_sink()]
        started.extend(Process(*one) for one in (("source", 0, 1), ("sink", 0, 1), ("sink", 0, 1)))
        return Handle("actor", started[:1]), [Handle(f"rollout/{n}", [rank]) for n, rank in enumerate(started[1:])]

    yield make
    for rank in started:
        rank.stop()
    assert not any(rank.process.is_alive() for rank in started)


def held(processes):
    """Return for each process what it holds: open files, threads, staging areas, memory."""
    gc.collect()
    found = []
    for one in processes:
        maps = Path(f"/proc/{one.pid}/maps").read_text()
        found.append([one.num_fds(), one.num_threads(), maps.count(PREFIX), one.memory_info().rss / 1024])
    return found


def left_over(folder, processes):
    """Return the names of what lies in the temporary folder, and of what these processes have left in shared memory."""
    shared = Path("/dev/shm")
    names = [path.name for path in shared.iterdir()] if shared.is_dir() else []
    mine = [name for name in names if any(str(one.pid) in name.split("-") for one in processes)]
    return [path.name for path in folder.iterdir()] + mine


async def disturb(transfer, update, sinks, number):
    """Push an update that fails in an engine, or one that is given up on its way."""
    if number % (2 * EVERY):
        await sinks[-1].call("break_once", deadline=DEADLINE)
        with pytest.raises(TransferError, match="this rank broke"):
            await transfer.push(update, deadline=DEADLINE)
        return
    task = asyncio.create_task(transfer.push(update, deadline=DEADLINE))
    await asyncio.sleep(0.002)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, TransferError):
        await task


@pytest.mark.parametrize("kind", CLASSES)
async def test_two_hundred_updates_leave_nothing_behind(kind, engines, tmp_path):
    source, sinks = engines(kind)
    for sink in sinks if kind != "local" else ():
        await sink.call("publish", "1.0", deadline=DEADLINE)
    transfer = pair(CLASSES[kind](kind, OPTIONS[kind]), source, sinks)
    ranks = [rank for handle in (source, *sinks) for rank in handle.ranks if isinstance(rank, Process)]
    processes = [psutil.Process(pid) for pid in (os.getpid(), *(rank.process.pid for rank in ranks))]
    samples = []
    for number in range(1, UPDATES + 1):
        update = Update(version=WeightVersion(1, number))
        if number % EVERY == 0:
            await disturb(transfer, update, sinks, number)
        else:
            await transfer.push(update, deadline=DEADLINE)
        if number > WARM and number % EVERY == EVERY // 2:
            samples.append(held(processes))
    await source.call("train", deadline=DEADLINE)
    await transfer.push(Update(version=WeightVersion(1, UPDATES + 1)), deadline=DEADLINE)
    for sink in sinks:
        [values] = await sink.call("values", deadline=DEADLINE)
        assert all(bool((values[name] == value(name, 1)).all()) for name in SHAPES)
    await transfer.close()
    for rank in ranks:
        rank.stop()
    assert left_over(tmp_path, processes) == []
    updates = np.arange(len(samples)) * EVERY
    slopes = np.polyfit(updates, np.array(samples, float).reshape(len(samples), -1), 1)[0].reshape(len(processes), -1)
    assert (slopes <= list(BOUNDS.values())).all(), f"{list(BOUNDS)} per update, by process: {slopes.tolist()}"
