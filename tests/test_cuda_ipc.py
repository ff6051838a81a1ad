"""The transfer `ipc` on one CUDA card: sinks in other processes read the trainer's own device memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

sys.path.append(str(Path(__file__).parents[1] / "core" / "tests" / "tensors"))
from transfer_world import SHAPES, Handle, Process, pair, value

from powertrain.errors import TransferError
from powertrain.tensors.ipc import IpcTransfer
from powertrain.weights import Update, WeightVersion

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, and torch.cuda.is_available() is False here", allow_module_level=True)
pytestmark = pytest.mark.cuda

DEADLINE = 60.0


def update(counter, **more):
    return Update(version=WeightVersion(1, counter), **more)


class World:
    """A trainer and engines, every rank in a process of its own on the one card."""

    def __init__(self, trainers=1, engines=1, **options):
        self.source = Handle("actor", [Process("cuda-source", rank, trainers) for rank in range(trainers)])
        self.sinks = [Handle(f"rollout/{i}", [Process("cuda-sink", 0, 1)]) for i in range(engines)]
        self.transfer = pair(
            IpcTransfer("ipc", {"keep_open": True, "bucket_mb": 1, **options}), self.source, self.sinks
        )

    async def start(self):
        for sink in self.sinks:
            await sink.call("resume", "1.0", deadline=DEADLINE)

    async def push(self, counter, **more):
        return await self.transfer.push(update(counter, **more), deadline=DEADLINE)

    async def check(self, step):
        for sink in self.sinks:
            (held,) = await sink.call("weights.values", deadline=DEADLINE)
            for name in SHAPES:
                assert torch.equal(held[name], value(name, step)), (sink.name, name)

    async def close(self):
        await self.transfer.close()
        for handle in [self.source, *self.sinks]:
            for rank in handle.ranks:
                rank.stop()


@pytest.fixture
async def world():
    made = []

    async def make(*args, **options):
        made.append(World(*args, **options))
        await made[-1].start()
        return made[-1]

    yield make
    for one in made:
        await one.close()


@pytest.mark.parametrize("keep_open", [True, False])
@pytest.mark.parametrize(("trainers", "engines"), [(1, 1), (2, 2)])
async def test_every_engine_gets_the_trainers_values(world, trainers, engines, keep_open):
    here = await world(trainers, engines, keep_open=keep_open)
    for step in range(4):
        report = await here.push(step + 1)
        await here.check(step)
        assert report.bytes == engines * sum(value(name, 0).numel() * 4 for name in SHAPES)
        await here.source.call("weights.train", deadline=DEADLINE)


@pytest.mark.parametrize("fenced", [True, False])
async def test_a_step_whose_kernels_are_still_queued_is_waited_for(world, fenced):
    here = await world()
    await here.push(1)
    await here.source.call("weights.set_fence", fenced, deadline=DEADLINE)
    await here.source.call("weights.train_late", deadline=DEADLINE)  # returns while its kernels wait behind a long one
    await here.push(2)
    (held,) = await here.sinks[0].call("weights.values", deadline=DEADLINE)
    new = [torch.equal(held[name], value(name, 1)) for name in SHAPES]
    assert all(new) if fenced else not all(new)  # without the fence this very test sees old weights


async def test_moved_weights_fail_one_update_unless_they_were_unmapped(world):
    here = await world()
    await here.push(1)
    await here.transfer.unmap(deadline=DEADLINE)
    await here.source.call("weights.move", deadline=DEADLINE)
    await here.push(2)
    await here.check(0)
    await here.source.call("weights.move", deadline=DEADLINE)
    with pytest.raises(TransferError, match=r"have moved.*every engine kept its old version"):
        await here.push(3)
    await here.push(4)
    await here.check(0)


async def test_an_offloaded_trainer_is_told(world):
    here = await world()
    await here.source.call("weights.offload", deadline=DEADLINE)
    with pytest.raises(TransferError, match="is not on a card"):
        await here.push(1)


async def test_a_trainer_that_died_is_told_at_once_and_nothing_is_written(world):
    here = await world()
    await here.push(1)
    here.source.ranks[0].process.kill()
    here.source.ranks[0].process.join()
    with pytest.raises(TransferError, match="every engine kept its old version"):
        await here.push(2)
    await here.check(0)


async def test_an_adapter_crosses_whole(world):
    here = await world()
    await here.source.call("weights.become_adapter", deadline=DEADLINE)
    await here.push(1, kind="adapter", adapter="policy-v1.1")
    (held,) = await here.sinks[0].call("weights.adapter_values", "policy-v1.1", deadline=DEADLINE)
    assert all(torch.equal(held[name].cpu(), value(name, 0)) for name in SHAPES)


async def test_blocks_on_another_card_go_by_shared_memory(world):
    here = await world(2, 1)
    await here.source.ranks_call(1, "elsewhere")
    for step in range(2):
        await here.push(step + 1)
        await here.check(step)
        await here.source.call("weights.train", deadline=DEADLINE)
    assert here.transfer._opened.rest is not None
    await here.sinks[0].call("weights.break_once", deadline=DEADLINE)
    with pytest.raises(TransferError, match="unfit until the next update: rollout/0"):
        await here.push(3)
    await here.push(4)
    await here.check(2)


async def test_many_updates_leave_nothing_behind(world):
    here = await world()
    await here.push(1)
    before = await here.sinks[0].call("weights.held", deadline=DEADLINE)
    for counter in range(2, 202):
        if counter % 20 == 0:
            await here.transfer.unmap(deadline=DEADLINE)
        await here.push(counter)
    after = await here.sinks[0].call("weights.held", deadline=DEADLINE)
    for (files, threads, free), (files_before, threads_before, free_before) in zip(after, before, strict=True):
        assert files <= files_before + 3
        assert threads <= threads_before + 1
        assert free >= free_before - (8 << 20)
