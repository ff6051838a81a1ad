"""Transfer `p2p` over gloo: many processes and uneven shards, bytes on the wire, and peers that stop or die."""

import asyncio
import gc
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from powertrain.errors import TransferError
from powertrain.tensors.p2p import P2pSink, P2pSource, P2pTransfer, _backend, messages
from powertrain.tensors.sidecar import Groups, Progress
from powertrain.testing.tensors.world import World
from powertrain.weights import Update, WeightVersion

sys.path.append(str(Path(__file__).parent))
from transfer_world import Handle, Process, inline_sink, inline_source, pair

DEADLINE = 60.0
SHORT = 4.0


def update(counter, **more):
    return Update(version=WeightVersion(1, counter), **more)


def p2p(**options):
    return P2pTransfer("p2p", {"backend": "auto", "bucket_mb": 1, **options})


def start(kind, rank, world):
    multiprocessing.get_context("forkserver").set_forkserver_preload(["powertrain.tensors.p2p"])
    return Process(kind, rank, world, start="forkserver")


class Fleet:
    """Trainer's ranks and engines, every rank in a process of its own, with version 1.0."""

    def __init__(self, trainers, engines):
        self.source = Handle("actor", [start("rows", rank, trainers) for rank in range(trainers)])
        self.sinks = [
            Handle(f"rollout/{e}", [start("columns", rank, world) for rank in range(world)])
            for e, world in enumerate(engines)
        ]
        self.transfer = pair(p2p(verify=0), self.source, self.sinks)
        self.counter = 0

    @property
    def ranks(self):
        return [rank for handle in [self.source, *self.sinks] for rank in handle.ranks]

    async def begin(self):
        for sink in self.sinks:
            await sink.call("publish", "1.0", deadline=DEADLINE)

    async def push(self, deadline=DEADLINE):
        self.counter += 1
        for rank in self.ranks:
            rank.seconds = deadline
        return await self.transfer.push(update(self.counter), deadline=deadline)

    async def wrong(self, step):
        return [await sink.call("wrong", step, deadline=DEADLINE) for sink in self.sinks]

    async def replace(self, handle, rank, kind):
        handle.ranks[rank].stop()
        handle.ranks[rank] = start(kind, rank, len(handle.ranks))
        if kind == "columns":
            await asyncio.to_thread(handle.ranks[rank].call, "publish", ("1.0",))

    def stop(self):
        for rank in self.ranks:
            os.kill(rank.process.pid, signal.SIGCONT)
            rank.stop()
        assert not any(rank.process.is_alive() for rank in self.ranks)


@pytest.fixture(scope="module")
def fleet():
    """Three trainer's ranks, an engine of two and an engine of one: six processes."""
    made = Fleet(3, (2, 1))
    asyncio.run(made.begin())
    yield made
    made.stop()


@pytest.fixture
def small(monkeypatch):
    """Let buckets be so small that there are many, and tensors are cut."""
    monkeypatch.setattr(P2pTransfer, "bucket_bytes", property(lambda self: 256))


@pytest.mark.parametrize("bucket", [256, 1 << 20])
async def test_uneven_shards_reach_two_engines_over_six_processes(fleet, monkeypatch, bucket):
    monkeypatch.setattr(P2pTransfer, "bucket_bytes", property(lambda self: bucket))
    fleet.transfer = pair(p2p(verify=1), fleet.source, fleet.sinks)
    step = (await fleet.source.call("changes", deadline=DEADLINE))[0]
    for _ in range(2):
        report = await fleet.push()
        assert await fleet.wrong(step) == [[[], []], [[]]]
        plan = fleet.transfer._made[1]
        assert report.bytes == sum(plan.pairs().values())
        await fleet.source.call("train", deadline=DEADLINE)
        step += 1
    assert len(plan.buckets) > 5 or bucket > 256
    await fleet.transfer.close()


async def test_eight_processes(small):
    many = Fleet(4, (3, 1))
    try:
        await many.begin()
        await many.push()
        assert await many.wrong(0) == [[[], [], []], [[]]]
        await many.transfer.close()
        held = [await asyncio.to_thread(psutil.Process(rank.process.pid).net_connections) for rank in many.ranks]
        assert [[one for one in some if one.status == "ESTABLISHED"] for some in held] == [[]] * 8
    finally:
        many.stop()


async def disturbed(fleet, victim, moment, sign):
    """Push while a rank signals itself; returns the error, seconds until every rank had answered, and all errors."""
    await asyncio.to_thread(victim.call, "arm", (moment, sign))
    for handle in [fleet.source, *fleet.sinks]:
        handle.errors.clear()
    begun, ended = time.monotonic(), []
    together = fleet.transfer._call

    async def timed(handle, op, **more):
        try:
            return await together(handle, op, **more)
        finally:
            ended.append(time.monotonic() - begun)

    fleet.transfer._call = timed
    with pytest.raises(TransferError) as caught:
        await fleet.push(deadline=SHORT)
    errors = [error for handle in [fleet.source, *fleet.sinks] for method, error in handle.errors if "call" in method]
    return caught.value, max(ended), errors


@pytest.mark.parametrize("moment", ["liveness", "wire", "completion"])
@pytest.mark.parametrize("side", ["source", "sink"])
async def test_stopped_peer_is_named_by_every_survivor_within_the_deadline(fleet, small, side, moment):
    fleet.transfer = pair(p2p(), fleet.source, fleet.sinks)
    await fleet.push()
    handle = fleet.source if side == "source" else fleet.sinks[0]
    name, victim = f"{handle.name} rank 1", handle.ranks[1]
    error, seconds, errors = await disturbed(fleet, victim, moment, signal.SIGSTOP)
    os.kill(victim.process.pid, signal.SIGCONT)
    assert seconds < SHORT + 1.0
    told = [str(one) for one in errors if not isinstance(one, TimeoutError)]
    assert len(told) == 5, errors
    assert [text for text in told if f"and {name} did not come along" not in text] == []
    assert [text for text in told if f"phase {moment!r}" not in text] == [] or moment != "liveness"
    assert f"and {name} did not come along" in str(error) or side == "source"
    await fleet.push()
    step = (await fleet.source.call("changes", deadline=DEADLINE))[0]
    assert await fleet.wrong(step) == [[[], []], [[]]]
    await fleet.transfer.close()


@pytest.mark.parametrize("side", ["source", "sink"])
async def test_killed_peer_is_noticed_at_once_and_replaced(fleet, small, side):
    fleet.transfer = pair(p2p(), fleet.source, fleet.sinks)
    await fleet.push()
    handle, kind = (fleet.source, "rows") if side == "source" else (fleet.sinks[0], "columns")
    _, seconds, errors = await disturbed(fleet, handle.ranks[1], "wire", signal.SIGKILL)
    told = [str(one) for one in errors if "did not come along" in str(one)]
    assert len(told) == 5, errors
    assert seconds < SHORT
    assert all(f"and {handle.name} rank 1 did not come along" in text for text in told)
    await fleet.replace(handle, 1, kind)
    steps = await fleet.source.call("changes", deadline=DEADLINE)
    for rank in fleet.source.ranks if side == "source" else ():
        for _ in range(max(steps) - await asyncio.to_thread(rank.call, "weights.changes", ())):
            await asyncio.to_thread(rank.call, "weights.train", ())
    await fleet.push()
    assert await fleet.wrong(max(steps)) == [[[], []], [[]]]
    await fleet.transfer.close()


async def test_peer_stopped_before_the_first_byte_leaves_every_engine_at_its_old_version(fleet):
    fleet.transfer = pair(p2p(), fleet.source, fleet.sinks)
    await fleet.push()
    before = [await sink.call("version", deadline=DEADLINE) for sink in fleet.sinks]
    victim = fleet.source.ranks[0]
    error, _, _ = await disturbed(fleet, victim, "liveness", signal.SIGSTOP)
    os.kill(victim.process.pid, signal.SIGCONT)
    assert error.unfit == ()
    assert "every engine kept its old version" in str(error)
    assert [await sink.call("version", deadline=DEADLINE) for sink in fleet.sinks] == before
    assert [await sink.call("state", deadline=DEADLINE) for sink in fleet.sinks] == [["steady"] * 2, ["steady"]]
    await fleet.push()
    await fleet.transfer.close()


async def test_many_updates_and_failures_leave_nothing_open(fleet):
    """B-leaks: groups that are made anew after each failure must not add up, in a rank or in the driver."""
    fleet.transfer = pair(p2p(), fleet.source, fleet.sinks)

    def held():
        gc.collect()
        found = [psutil.Process(rank.process.pid) for rank in fleet.ranks] + [psutil.Process()]
        return [(one.num_fds(), one.num_threads()) for one in found]

    counts = []
    for number in range(6):
        await fleet.push()
        await asyncio.to_thread(fleet.sinks[0].ranks[0].call, "weights.__setattr__", ("broken", True))
        with pytest.raises(TransferError, match="this rank broke"):
            await fleet.push()
        counts.append(held()) if number > 1 else None
    await fleet.push()
    await fleet.transfer.close()
    growth = [(last[0] - first[0], last[1] - first[1]) for first, last in zip(counts[0], counts[-1], strict=True)]
    assert all(files <= 3 and threads <= 1 for files, threads in growth), growth


# ---- ranks as threads of this process
@pytest.fixture
def join(monkeypatch):
    made = []

    def join(bucket=1 << 20, **sizes):
        monkeypatch.setattr(P2pTransfer, "bucket_bytes", property(lambda self: bucket))
        world = World({"source": P2pSource, "sink": P2pSink}, **sizes)
        transfer = pair(p2p(), world.source, world.sinks)
        made.append((transfer, world))
        return transfer, world

    yield join
    for transfer, world in made:
        asyncio.run(transfer.close())
        world.close()


class Counting:
    """A group that counts what it is given to carry, and knows nothing but sending and receiving."""

    def __init__(self, group, sent):
        self._group, self._sent = group, sent

    def send(self, tensors, peer, tag):
        self._sent.append((peer, sum(tensor.numel() * tensor.element_size() for tensor in tensors)))
        return self._group.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        return self._group.recv(tensors, peer, tag)

    def abort(self):
        self._group.abort()


@pytest.mark.parametrize("bucket", [256, 512, 1 << 20])
async def test_bytes_on_the_wire_are_the_plans(join, monkeypatch, bucket):
    sent, weights = [], Groups._weights
    monkeypatch.setattr(Groups, "_weights", lambda self, *args: Counting(weights(self, *args), sent))
    transfer, world = join(bucket, trainer=3, engines=(2, 3))
    report = await transfer.push(update(1), deadline=DEADLINE)
    assert [sink.wrong(0) for sink in world.weights] == [[]] * 5
    plan = transfer._made[1]
    pairs = {}
    for (_, engine, rank), count in plan.pairs().items():
        peer = 3 + (0, 2)[engine] + rank
        pairs[peer] = pairs.get(peer, 0) + count
    assert {peer: sum(n for p, n in sent if p == peer) for peer in pairs} == pairs
    assert report.bytes == sum(pairs.values())
    assert max(n for _, n in sent) <= bucket


async def test_no_more_than_two_buckets_are_under_way(join, monkeypatch):
    under_way, most = {}, []
    send, finish = Groups.send, Groups.finish

    def sending(self, data, peer, tag):
        work = send(self, data, peer, tag)
        under_way[self.rank] = under_way.get(self.rank, 0) + data.numel()
        most.append(under_way[self.rank])
        works[id(work)] = (work, data.numel())
        return work

    def finishing(self, work, peer, tensor):
        finish(self, work, peer, tensor)
        under_way[self.rank] = under_way.get(self.rank, 0) - works.get(id(work), (None, 0))[1]

    works = {}
    monkeypatch.setattr(Groups, "send", sending)
    monkeypatch.setattr(Groups, "finish", finishing)
    transfer, world = join(256, trainer=1, engines=(3, 2))
    await transfer.push(update(1), deadline=DEADLINE)
    assert [sink.wrong(0) for sink in world.weights] == [[]] * 5
    assert 256 < max(most) <= 512


async def test_groups_are_kept_from_update_to_update_and_new_after_a_failure(join):
    transfer, world = join(trainer=2, engines=(2,))

    def groups():
        return [rank._made["p2p"]._sessions[transfer.session].groups for rank in world.source.ranks]

    await transfer.push(update(1), deadline=DEADLINE)
    first = groups()
    await transfer.push(update(2), deadline=DEADLINE)
    assert groups() == first
    world.weights[1].broken = True
    with pytest.raises(TransferError, match="this rank broke"):
        await transfer.push(update(3), deadline=DEADLINE)
    assert [(one._payload, one._sidecar) for one in first] == [(None, None)] * 2
    await transfer.push(update(4), deadline=DEADLINE)
    assert groups() != first
    assert [sink.version for sink in world.weights] == ["1.4", "1.4"]


async def test_default_group_of_a_rank_is_left_alone(join, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        before = dist.distributed_c10d._world.pg_map.copy()
        transfer, _ = join(trainer=2, engines=(1,))
        await transfer.push(update(1), deadline=DEADLINE)
        assert dist.distributed_c10d._world.pg_map == before
        await transfer.close()
        assert dist.get_world_size() == 1
        dist.barrier()
    finally:
        dist.destroy_process_group()


async def test_a_ranks_own_fault_is_told_by_all(join):
    transfer, world = join(trainer=2, engines=(1, 1))
    await transfer.push(update(1), deadline=DEADLINE)
    world.weights[1].broken = True
    begun = time.monotonic()
    with pytest.raises(TransferError, match=r"rollout/1 rank 0 did not come along: it failed: this rank broke"):
        await transfer.push(update(2), deadline=DEADLINE)
    assert time.monotonic() - begun < DEADLINE / 2


async def test_device_is_synchronised_before_the_completion_barrier(join, monkeypatch):
    """Success must not be told while copies are pending; here the order alone, on a card tests/test_cuda.py."""
    events = []
    barrier = Groups.barrier
    monkeypatch.setattr(Groups, "barrier", lambda self, phase: (events.append(phase), barrier(self, phase)))
    monkeypatch.setattr("powertrain.tensors.p2p.device_of", lambda weights: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append("synchronised"))
    monkeypatch.setattr(P2pSource, "where", lambda self, session: ("cpu", ""))
    monkeypatch.setattr(P2pSink, "where", lambda self, session: ("cpu", ""))
    transfer, _ = join()
    await transfer.push(update(1), deadline=DEADLINE)
    assert events[:2] == ["setup"] * 2
    assert sorted(events[2:4]) == ["liveness"] * 2
    assert events.index("completion") > events.index("synchronised")
    assert sorted(events[4:]) == ["completion"] * 2 + ["synchronised"] * 2


def test_port_is_one_that_core_reserves_and_only_loopback_listens(join):
    transfer, _ = join()
    asyncio.run(transfer.push(update(1), deadline=DEADLINE))
    port = transfer._store.port
    assert 20000 <= port <= 32000
    mine = [one for one in psutil.Process().net_connections() if one.status == "LISTEN" and one.laddr.port == port]
    assert {one.laddr.ip for one in mine} == {"127.0.0.1"}
    asyncio.run(transfer.close())
    mine = [one for one in psutil.Process().net_connections() if one.status == "LISTEN" and one.laddr.port == port]
    assert mine == []


async def test_adapter_arrives_whole():
    source, sink = inline_source(), inline_sink()
    source.ranks[0].weights.become_adapter()
    transfer = pair(p2p(), source, [sink])
    await transfer.push(update(2, kind="adapter", adapter="policy-v1.2"), deadline=DEADLINE)
    assert sorted(sink.ranks[0].weights.adapters["policy-v1.2"]) == ["embed", "norm", "scalar"]
    await transfer.close()


@pytest.mark.parametrize(
    ("places", "wanted", "chosen"),
    [
        ([("cpu", ""), ("cpu", "")], "auto", "gloo"),
        ([("cuda", "a"), ("cuda", "b")], "auto", "nccl"),
        ([("cuda", "a"), ("cuda", "a")], "auto", "gloo"),
        ([("cuda", "a"), ("cpu", "")], "auto", "gloo"),
        ([("npu", ""), ("npu", "")], "auto", "hccl"),
        ([("cuda", "a"), ("cuda", "b")], "gloo", "gloo"),
    ],
)
def test_backend_goes_by_the_devices(places, wanted, chosen):
    assert _backend(places, wanted) == chosen


@pytest.mark.parametrize("places", [[("cuda", "a"), ("cuda", "a")], [("cuda", "a"), ("cpu", "")]])
def test_nccl_is_refused_where_it_cannot_be(places):
    with pytest.raises(TransferError, match=r"every rank on a card of its own.*use backend=gloo"):
        _backend(places, "nccl")


async def test_backend_that_torch_lacks_is_told(join):
    transfer, _ = join()
    transfer.options["backend"] = "hccl"
    with pytest.raises(TransferError, match=r"no backend 'hccl' on .*; use backend=gloo"):
        await transfer.push(update(1), deadline=DEADLINE)


def test_both_ends_see_messages_in_one_order_without_a_gap():
    from powertrain.weights.plan import Block, Read

    def read(name, dtype, bucket):
        return Read(name, Block(name, dtype, (0,), (3,), 0, name, 0, (1,), bucket, 0), (0,), (3,))

    some = [read("a", "uint8", 0), read("b", "float32", 0), read("c", "bfloat16", 0), read("d", "float32", 1)]
    sending = messages([(2, one) for one in some], 0, 3)
    receiving = messages([(0, one) for one in some], 2, 3)
    assert [one.order for one in sending] == [one.order for one in receiving]
    assert [[one.name for one in message.reads] for message in sending] == [["b", "c", "a"], ["d"]]
    assert sending[0].bytes == 12 + 6 + 3
    buffer = torch.arange(21, dtype=torch.uint8)
    assert [view.data_ptr() - buffer.data_ptr() for _, view in sending[0].views(buffer)] == [0, 12, 18]


def progress(world):
    store = dist.HashStore()
    names = [f"rank {rank}" for rank in range(world)]
    return [Progress(store, rank, names) for rank in range(world)]


def test_whom_all_waited_for_is_found_over_others_who_waited():
    ranks = progress(4)
    for rank in ranks:
        rank.reach(2)
    ranks[1].tell(3, "timed out")
    ranks[2].tell(1, "timed out")
    assert ranks[0].blame(2, "timed out", 0.05) == (3, "")


def test_who_has_not_come_so_far_is_blamed_for_a_barrier():
    ranks = progress(4)
    for rank, stage in zip(ranks, (4, 4, 2, 5), strict=True):
        rank.reach(stage)
    assert ranks[0].blame(None, "timed out", 0.05) == (2, "")


def test_who_never_came_is_blamed():
    ranks = progress(3)
    ranks[0].reach(0)
    ranks[1].reach(0)
    ranks[1].tell(None, "timed out")
    assert ranks[0].blame(None, "timed out", 0.05) == (2, "")


def test_fault_of_its_own_comes_before_all():
    ranks = progress(4)
    for rank in ranks:
        rank.reach(2)
    ranks[3].tell(None, "disk on fire", own=True)
    assert ranks[0].blame(1, "closed", 5.0) == (3, "disk on fire")
