"""Transfer `shm`: ranks that go through buckets by themselves wait for one another, and for nobody who has failed."""

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from powertrain.errors import DeadlineError, TransferError, WorkerError
from powertrain.tensors import shm as shm_module
from powertrain.tensors.area import Area
from powertrain.tensors.ledger import Ledger
from powertrain.tensors.shm import ShmTransfer
from powertrain.weights import Update, WeightVersion

sys.path.append(str(Path(__file__).parent))
from transfer_world import SHAPES, Handle, Process, inline_sink, inline_source, pair, value

DEADLINE = 60.0
SOON = 20.0
"""Seconds in which what must not wait for the deadline has to be over."""


def update(counter):
    return Update(version=WeightVersion(1, counter))


@pytest.fixture(autouse=True)
def one_slot(monkeypatch):
    """Let every bucket wait until the one before it has been read: five buckets, one slot."""
    monkeypatch.setattr(ShmTransfer, "bucket_bytes", property(lambda self: 256))
    monkeypatch.setattr(shm_module, "SLOTS", 1)


@pytest.fixture
def fleet(tmp_path):
    """Two trainer's ranks and two engines, each rank in a process of its own."""
    ranks = [Process("source", 0, 2), Process("source", 1, 2), Process("sink", 0, 1), Process("sink", 0, 1)]
    for rank in ranks[2:]:
        rank.call("publish", ("1.0",))
    sinks = [Handle(f"rollout/{n}", [rank]) for n, rank in enumerate(ranks[2:])]
    yield pair(ShmTransfer("shm", {"folder": str(tmp_path), "direct": False}), Handle("actor", ranks[:2]), sinks), ranks
    for rank in ranks:
        rank.stop()


async def check(sinks, step):
    for sink in sinks:
        [held] = await sink.call("values", deadline=DEADLINE)
        assert {name: torch.equal(held[name], value(name, step)) for name in SHAPES} == dict.fromkeys(SHAPES, True)


async def test_buckets_go_one_after_another_through_one_slot(fleet):
    transfer, _ = fleet
    for step in range(3):
        report = await transfer.push(update(step + 1), deadline=DEADLINE)
        assert report.bytes == sum(value(name, 0).numel() * 4 for name in SHAPES)
        await check(transfer.sinks, step)
        await transfer.source.call("train", deadline=DEADLINE)
    assert len((await transfer.plan(transfer.source, transfer.sinks, deadline=DEADLINE)).buckets) == 5
    await transfer.close()


async def test_a_failed_engine_ends_the_others_waits_at_once(fleet):
    transfer, _ = fleet
    await transfer.push(update(1), deadline=DEADLINE)
    await transfer.sinks[1].call("break_once", deadline=DEADLINE)
    async with asyncio.timeout(SOON):
        with pytest.raises(TransferError, match="in phase 'load': this rank broke"):
            await transfer.push(update(2), deadline=DEADLINE)
        await transfer.push(update(3), deadline=DEADLINE)
    await check(transfer.sinks, 0)


async def test_a_stopped_engine_is_named_by_the_trainer_and_healed(fleet):
    transfer, ranks = fleet
    await transfer.push(update(1), deadline=DEADLINE)
    plain = transfer.sinks[1].call

    async def stop_first(method, *args, deadline):
        if method == "endpoint.call" and args[1] == "read":
            os.kill(ranks[3].process.pid, signal.SIGSTOP)
            await asyncio.get_running_loop().run_in_executor(None, time.sleep, 1.6)
            os.kill(ranks[3].process.pid, signal.SIGCONT)
        return await plain(method, *args, deadline=deadline)

    transfer.sinks[1].call = stop_first
    with pytest.raises(
        TransferError, match=r"actor rank \d waited 1\.\d s for .*; rollout/1 rank 0 is stopped, dead or stuck"
    ):
        await transfer.push(update(2), deadline=1.5)
    transfer.sinks[1].call = plain
    async with asyncio.timeout(SOON):
        await transfer.push(update(3), deadline=DEADLINE)
    await check(transfer.sinks, 0)


async def test_a_killed_trainer_lets_engines_go(fleet):
    transfer, ranks = fleet
    await transfer.push(update(1), deadline=DEADLINE)
    plain = transfer.source.call

    async def kill_first(method, *args, deadline):
        if method == "endpoint.call" and args[1] == "write":
            ranks[1].process.kill()
            ranks[1].process.join(10)
            message = "actor rank 1 has died"
            raise WorkerError(message)
        return await plain(method, *args, deadline=deadline)

    transfer.source.call = kill_first
    async with asyncio.timeout(SOON):
        with pytest.raises(TransferError, match="actor rank 1 has died"):
            await transfer.push(update(2), deadline=DEADLINE)
        assert [await sink.call("state", deadline=DEADLINE) for sink in transfer.sinks] == [["steady"]] * 2
    await check(transfer.sinks, 0)


async def test_a_cancelled_push_leaves_nobody_waiting(tmp_path):
    source, sinks = inline_source(), [inline_sink(), inline_sink("rollout/1", slow=0.05)]
    transfer = pair(ShmTransfer("shm", {"folder": str(tmp_path)}), source, sinks)
    await transfer.push(update(1), deadline=DEADLINE)
    async with asyncio.timeout(SOON):
        task = asyncio.create_task(transfer.push(update(2), deadline=DEADLINE))
        await asyncio.sleep(0.06)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.2)  # the ranks' threads end by themselves
        await transfer.push(update(3), deadline=DEADLINE)
    assert [sink.ranks[0].weights.version for sink in sinks] == ["1.3"] * 2
    await transfer.close()


def ledger(tmp_path, ranks):
    area = Area.create(tmp_path, "ledger", Area.PAGE, 1, 1 + ranks)
    return area, Ledger(area.lines(), [f"rank {n}" for n in range(ranks)])


def test_ledger_waits_for_the_late_and_names_the_first(tmp_path):
    area, told = ledger(tmp_path, 3)
    told.post(1, 2)
    end = time.monotonic() + 0.01
    assert told.wait(0, [1], 2, "write", end)
    with pytest.raises(DeadlineError, match=r"rank 0 waited 0\.0 s for rank 2 to write bucket 1; rank 2 is stopped"):
        told.wait(0, [1, 2], 1, "write bucket 1", end)
    assert not told.stopped
    with pytest.raises(KeyError), told.stopping():
        raise KeyError
    assert not told.wait(0, [1, 2], 1, "write", end)
    del told
    area.unlink()
    area.close()


def test_area_is_pinned_for_a_card_only_and_let_go_at_its_end(tmp_path, monkeypatch, caplog):
    class Runtime:
        """Answers as the CUDA runtime does; there is no card here."""

        def __init__(self, code):
            self.code, self.called = code, []

        def cudaHostRegister(self, address, size, flags):
            self.called.append(("register", size, flags))
            return self.code

        def cudaHostUnregister(self, address):
            self.called.append(("unregister",))

    def pinned(code, device):
        runtime = Runtime(code)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        area = Area.create(tmp_path, f"pinned-{code}", Area.PAGE, 2, 1)
        area.pin(torch.device(device))
        area.pin(torch.device(device))
        area.unlink()
        area.close()
        return runtime.called

    assert pinned(0, "cpu") == []
    assert pinned(0, "cuda") == [("register", 2 * Area.PAGE + Area.LINE, 0), ("unregister",)]
    with caplog.at_level(logging.WARNING):
        assert ("unregister",) not in pinned(2, "cuda")
    assert "cannot be pinned (CUDA error 2)" in caplog.text
