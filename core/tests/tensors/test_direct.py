"""Shm's direct path: what arrives, in places of every kind, and what is done where the system does not allow it."""

import errno
import sys
from pathlib import Path

import pytest
import torch

from powertrain.errors import DeadlineError, TransferError
from powertrain.tensors import direct, direct_copies
from powertrain.tensors.ledger import Ledger, Stopped
from powertrain.tensors.shm import ShmTransfer
from powertrain.weights import Update, WeightVersion

sys.path.append(str(Path(__file__).parent))
from direct_world import SHAPES, MixedSink, MixedSource, value
from transfer_world import Handle, Process, pair

DEADLINE = 60.0
BYTES = sum(value(name, 0).nbytes for name in SHAPES)


def update(counter):
    return Update(version=WeightVersion(1, counter))


@pytest.fixture(scope="module")
def ranks():
    """Start two trainer's ranks and two engines, each in a process of its own."""
    started = [Process(MixedSource, rank, 2) for rank in range(2)] + [Process(MixedSink, 0, 1) for _ in range(2)]
    for rank in started[2:]:
        rank.call("publish", ("1.0",))
    yield started
    for rank in started:
        rank.stop()


@pytest.fixture
def make(ranks, tmp_path):
    """Make the pair anew; what was counted before goes on."""
    made = []

    def pairs(**options):
        sinks = [Handle(f"rollout/{n}", [rank]) for n, rank in enumerate(ranks[2:])]
        options = {"folder": str(tmp_path), "bucket_mb": 64, **options}
        made.append(pair(ShmTransfer("shm", options), Handle("actor", ranks[:2]), sinks))
        return made[-1]

    yield pairs
    assert list(tmp_path.iterdir()) == []


counter = iter(range(1, 1000))


async def push(transfer):
    return await transfer.push(update(next(counter)), deadline=DEADLINE)


async def check(transfer):
    [step, _] = await transfer.source.call("step", deadline=DEADLINE)
    for sink in transfer.sinks:
        assert await sink.call("weights.wrong", step, deadline=DEADLINE) == [[]]


@pytest.mark.parametrize("threads", [1, 2])
async def test_every_kind_of_place_is_read_directly(make, threads):
    transfer = make(verify=1)
    for sink in transfer.sinks:
        await sink.call("threads", threads, deadline=DEADLINE)
    for _ in range(2):
        await transfer.source.call("train", deadline=DEADLINE)
        report = await push(transfer)
        assert (report.details["direct"], report.bytes) == (1.0, BYTES)
        await check(transfer)
    await transfer.close()


@pytest.mark.parametrize("side", ["source", "sinks"])
async def test_storages_that_moved_are_found(make, side):
    transfer = make()
    await push(transfer)
    for handle in [transfer.source] if side == "source" else transfer.sinks:
        await handle.call("move", deadline=DEADLINE)
    await transfer.source.call("train", deadline=DEADLINE)
    assert (await push(transfer)).details["direct"] == 1.0
    await check(transfer)
    await transfer.close()


async def test_switched_off_all_is_staged(make):
    transfer = make(direct=False)
    await transfer.source.call("train", deadline=DEADLINE)
    assert (await push(transfer)).details["direct"] == 0.0
    await check(transfer)
    await transfer.close()


@pytest.mark.parametrize("code", [errno.EPERM, errno.ESRCH, errno.ENOSYS])
async def test_where_the_system_refuses_all_is_staged_and_it_is_told_once(make, caplog, code):
    caplog.set_level("INFO")
    transfer = make()
    await transfer.sinks[1].call("fail_reads", code, deadline=DEADLINE)
    for _ in range(2):
        await transfer.source.call("train", deadline=DEADLINE)
        assert (await push(transfer)).details["direct"] == 0.0
        await check(transfer)
    await transfer.sinks[1].call("fail_reads", 0, deadline=DEADLINE)
    assert [record.name for record in caplog.records].count("powertrain.shm") == 1
    assert "trainer rank 0 cannot be read" in caplog.text
    await transfer.close()


async def test_a_refusal_in_the_middle_names_the_rank_and_the_tensor_and_the_next_update_heals(make):
    transfer = make()
    await push(transfer)
    await transfer.source.call("train", deadline=DEADLINE)
    await transfer.sinks[0].call("fail_reads", -errno.EPERM, deadline=DEADLINE)
    with pytest.raises(TransferError, match=r"trainer rank \d could not be read for '\w+': Operation not permitted"):
        await push(transfer)
    assert await transfer.sinks[0].call("weights.state", deadline=DEADLINE) == ["unfit"]
    await transfer.sinks[0].call("fail_reads", 0, deadline=DEADLINE)
    assert (await push(transfer)).details["direct"] == 1.0
    await check(transfer)
    await transfer.close()


async def test_a_wrong_token_is_no_trainer(tmp_path, ranks):
    trainer = Process(MixedSource, 0, 1)
    trainer.call("spoil_token", ())
    transfer = pair(ShmTransfer("shm", {"folder": str(tmp_path)}), Handle("actor", [trainer]), [])
    transfer.sinks = [Handle("rollout/0", ranks[2:3])]
    report = await transfer.push(update(next(counter)), deadline=DEADLINE)
    assert report.details["direct"] == 0.0
    assert await transfer.sinks[0].call("weights.wrong", 0, deadline=DEADLINE) == [[]]
    await transfer.close()
    trainer.stop()


async def test_tensors_that_are_made_for_each_update_are_staged(tmp_path, ranks):
    trainer = Process(MixedSource, 0, 1)
    trainer.call("make_anew", ())
    transfer = pair(ShmTransfer("shm", {"folder": str(tmp_path)}), Handle("actor", [trainer]), [])
    transfer.sinks = [Handle("rollout/0", ranks[2:3])]
    assert (await transfer.push(update(next(counter)), deadline=DEADLINE)).details["direct"] == 0.0
    assert await transfer.sinks[0].call("weights.wrong", 0, deadline=DEADLINE) == [[]]
    await transfer.close()
    trainer.stop()


async def test_a_killed_trainer_is_named(tmp_path, ranks):
    trainer = Process(MixedSource, 0, 1)
    transfer = pair(ShmTransfer("shm", {"folder": str(tmp_path)}), Handle("actor", [trainer]), [])
    transfer.sinks = [Handle("rollout/0", ranks[2:3])]
    await transfer.push(update(next(counter)), deadline=DEADLINE)
    plain = transfer.sinks[0].call

    async def kill_first(method, *args, deadline):
        if method == "endpoint.call" and args[1] == "take":
            trainer.process.kill()
            trainer.process.join(10)
        return await plain(method, *args, deadline=deadline)

    transfer.sinks[0].call = kill_first
    with pytest.raises(TransferError, match="trainer rank 0 cannot be read any more: No such process"):
        await transfer.push(update(next(counter)), deadline=DEADLINE)
    assert await plain("weights.state", deadline=DEADLINE) == ["steady"]


def test_a_rank_ends_at_its_deadline_and_when_another_one_has_failed():
    lines = torch.zeros(3, 8, dtype=torch.int64)
    ledger = Ledger(lines, ["actor rank 0", "rollout/0 rank 0"])
    ledger.look(1, 0.0, 1e18)
    with pytest.raises(DeadlineError, match=r"rollout/0 rank 0 has taken .* raise the deadline"):
        ledger.look(1, 0.0, 0.0)
    ledger.stop()
    with pytest.raises(Stopped):
        ledger.look(1, 0.0, 0.0)


def test_readers_are_let_in_while_a_pair_is_open_and_not_longer(monkeypatch):
    """Yama's scope 1 lets a process in by its number, or any."""
    asked = []

    class Libc:
        def prctl(self, *args):
            asked.append(args[:2])

    monkeypatch.setattr(direct, "LIBC", Libc())
    offers = direct.Offers(MixedSource(0, 1), 0)
    for session, readers in (("a", [71]), ("b", [71]), ("c", [71, 72])):
        assert isinstance(offers.make(session, [], readers), dict)
    for session in "cbaa":
        offers.release(session)
    who = [one for _, one in asked]
    assert {what for what, _ in asked} == {0x59616D61}
    assert who == [71, 71, (1 << 64) - 1, 71, 71, 0]


@pytest.mark.parametrize("limit", [64, 1000])
def test_slabs_cover_a_place_once(monkeypatch, limit):
    monkeypatch.setattr(direct_copies, "SCRATCH", limit)
    target, source = torch.zeros(3, 5, 40, dtype=torch.bfloat16), torch.arange(600.0).reshape(3, 5, 40)
    parts = list(direct_copies._slabs(target, source))
    for here, there in parts:
        assert there.nbytes <= limit
        here += there
    assert torch.equal(target, source.to(torch.bfloat16))
