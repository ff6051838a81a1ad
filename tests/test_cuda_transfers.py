"""Transfers p2p and disk and the option verify on one CUDA card; p2p over gloo: NCCL wants a card for each rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

sys.path.append(str(Path(__file__).parents[1] / "core" / "tests" / "tensors"))
from transfer_world import SHAPES, Handle, Process, pair, value

from powertrain.errors import TransferError
from powertrain.tensors.disk import DiskTransfer
from powertrain.tensors.ipc import IpcTransfer
from powertrain.tensors.p2p import P2pTransfer
from powertrain.tensors.verify import checksum
from powertrain.weights import Update, WeightVersion

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, and torch.cuda.is_available() is False here", allow_module_level=True)
pytestmark = pytest.mark.cuda

DEADLINE = 60.0
CLASSES = {"ipc": IpcTransfer, "p2p": P2pTransfer, "disk": DiskTransfer}


@pytest.fixture(scope="module")
def fleet():
    """Two trainer's ranks and two engines, every rank in a process of its own on the one card."""
    ranks = [Process(*one) for one in (("cuda-source", 0, 2), ("cuda-source", 1, 2), *[("cuda-sink", 0, 1)] * 2)]
    for rank in ranks[2:]:
        rank.call("resume", ("1.0",))
    yield Handle("actor", ranks[:2]), [Handle(f"rollout/{i}", [ranks[2 + i]]) for i in range(2)]
    for rank in ranks:
        rank.stop()


@pytest.fixture
async def world(fleet, tmp_path):
    made = []

    def make(kind, **options):
        given = {"folder": str(tmp_path), "bucket_mb": 1, "keep_open": True, "verify": 1, **options}
        made.append(pair(CLASSES[kind](kind, given if kind != "ipc" else {**given, "folder": None}), *fleet))
        return made[-1], *fleet

    yield make
    for one in made:
        await one.close()


async def step_of(source):
    return (await source.call("weights.changes", deadline=DEADLINE))[0]


async def check(sinks, step):
    for sink in sinks:
        (held,) = await sink.call("weights.values", deadline=DEADLINE)
        assert {name: torch.equal(held[name], value(name, step)) for name in SHAPES} == dict.fromkeys(SHAPES, True)


def update(counter):
    return Update(version=WeightVersion(2, counter))


@pytest.mark.parametrize("kind", ["ipc", "p2p", "disk"])
async def test_every_engine_gets_the_trainers_values_verified(world, kind):
    transfer, source, sinks = world(kind)
    for counter in (1, 2):
        await transfer.push(update(counter), deadline=DEADLINE)
        await check(sinks, await step_of(source))
        await source.call("weights.train", deadline=DEADLINE)


@pytest.mark.parametrize("kind", ["p2p", "disk"])
async def test_a_step_whose_kernels_are_still_queued_is_waited_for(world, kind):
    transfer, source, sinks = world(kind, verify=0)
    await transfer.push(update(1), deadline=DEADLINE)
    await source.call("weights.train_late", deadline=DEADLINE)  # returns while its kernels wait behind a long one
    await transfer.push(update(2), deadline=DEADLINE)
    await check(sinks, await step_of(source))


@pytest.mark.parametrize(("waited", "pending"), [(True, [False, False]), (False, [False, True])])
async def test_completion_is_not_told_while_a_copy_is_pending(world, waited, pending):
    """A long kernel lies before an engine's copies; no rank may pass the barrier before these have run."""
    transfer, _, sinks = world("p2p", verify=0)
    await transfer.push(update(1), deadline=DEADLINE)
    await sinks[1].call("weights.delay_copies", waited, deadline=DEADLINE)
    await transfer.push(update(2), deadline=DEADLINE)
    told = [(await sink.call("weights.pending_at_completion", deadline=DEADLINE))[0] for sink in sinks]
    assert told == pending  # without the wait this very test sees a copy that is pending


@pytest.mark.parametrize("kind", ["ipc", "p2p", "disk"])
async def test_wrong_weights_are_told(world, kind):
    transfer, _, sinks = world(kind)
    await transfer.push(update(1), deadline=DEADLINE)
    await sinks[1].call("weights.spoil_next", deadline=DEADLINE)
    with pytest.raises(TransferError, match=r"rollout/1: 'embed'\[.* has checksum"):
        await transfer.push(update(2), deadline=DEADLINE)
    await transfer.push(update(3), deadline=DEADLINE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn])
def test_checksum_is_the_same_on_every_device(dtype):
    tensor = torch.arange(3_000_001).remainder(251).to(dtype)
    assert int(checksum("w", tensor.cuda())) == int(checksum("w", tensor))
