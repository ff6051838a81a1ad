"""The option `delta` of p2p and disk: what arrives is what a full update brings, and who may build on what."""

import asyncio
import contextlib
import dataclasses
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from powertrain.errors import PowertrainError, TransferError
from powertrain.tensors import delta
from powertrain.tensors.disk import DiskSink, DiskSource, DiskTransfer
from powertrain.tensors.disk_files import load_version
from powertrain.tensors.disk_folder import Folder, chain
from powertrain.tensors.p2p import P2pSink, P2pSource, P2pTransfer
from powertrain.tensors.sidecar import Groups
from powertrain.testing.tensors import world as worlds
from powertrain.testing.tensors.world import Sink, Source, World
from powertrain.weights import Update, WeightVersion

DEADLINE = 60.0
SHAPES = {"embed": (67, 33), "cube": (3, 2, 50), "norm": (130,), "scalar": ()}
INTS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


class Pair:
    """A transfer with the option and its world. dtypes: of the trainer's and the engines' weights."""

    def __init__(self, kind, folder, *, trainer=1, engines=(1,), dtypes=("float32", "float32"), **options):
        parts = {"p2p": (P2pTransfer, P2pSource, P2pSink), "disk": (DiskTransfer, DiskSource, DiskSink)}
        make, source, sink = parts[kind]
        self.world = World({"source": source, "sink": sink}, trainer=trainer, engines=engines)
        for rank in self.world.source.ranks:
            become(rank.weights, dtypes[0])
        for weights in self.world.weights:
            become(weights, dtypes[1])
        more = {"folder": str(folder), "keep": 1} if kind == "disk" else {}
        self.transfer = make(kind, {"bucket_mb": 1, "delta": "host", **more, **options})
        self.transfer.source, self.transfer.sinks = self.world.source, self.world.sinks
        self.counter = 0

    async def push(self, **more):
        self.counter += 1
        update = Update(version=WeightVersion(1, self.counter), **more)
        return await self.transfer.push(update, deadline=DEADLINE)

    def change(self, share, seed=0):
        """Give a share of the trainer's elements another bit pattern; None: one element."""
        generator = torch.Generator().manual_seed(seed)
        left = 1
        for rank in self.world.source.ranks:
            for entry in rank.weights.manifest():
                for _ in entry.boxes:
                    storage = rank.weights.tensors()[entry.name]
                    bits = storage.view(INTS[storage.dtype])[3:]
                    if share is None:
                        picked, left = torch.zeros(left, dtype=torch.int64), 0
                    else:
                        picked = (torch.rand(len(bits), generator=generator) < share).nonzero().squeeze(1)
                    bits[picked] ^= torch.randint(1, 1 << 15, (len(picked),), generator=generator).to(bits.dtype)

    def equal(self):
        """Tell whether every engine holds, bit by bit, what the trainer does."""
        wanted = whole([rank.weights for rank in self.world.source.ranks])
        for handle in self.world.sinks:
            held = whole([rank.weights for rank in handle.ranks])
            for name, tensor in held.items():
                bits = INTS[tensor.dtype]
                if not torch.equal(tensor.view(bits), wanted[name].to(tensor.dtype).view(bits)):
                    return False
        return True

    async def close(self):
        await self.transfer.close()
        self.world.close()


def become(weights, dtype):
    """Let a rank hold its weights in another dtype."""
    held = getattr(torch, dtype)
    tensors = {name: tensor.to(held) for name, tensor in weights.tensors().items()}
    others = tuple({"float32", "bfloat16"} - {dtype})
    entries = [dataclasses.replace(entry, dtype=dtype, accepts=others) for entry in weights._manifest.entries]
    weights._manifest = dataclasses.replace(weights._manifest, entries=tuple(entries))
    if isinstance(weights, Sink):
        weights._tensors, weights._entries = tensors, weights._manifest.by_name()
    else:
        weights._storages = tensors


def whole(ranks):
    """Return the whole tensors that ranks hold parts of."""
    found = {}
    for weights in ranks:
        for entry in weights.manifest():
            storage = weights.tensors()[entry.name]
            tensor = found.setdefault(entry.name, torch.zeros(entry.shape, dtype=storage.dtype))
            for box in entry.boxes:
                ours = tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))
                tensor[ours] = storage[3:].view(box.size)
    return found


@pytest.fixture
def join(monkeypatch, tmp_path):
    monkeypatch.setattr(worlds, "SHAPES", SHAPES)
    made = []

    def join(kind="p2p", bucket=1 << 20, **more):
        monkeypatch.setattr(P2pTransfer, "bucket_bytes", property(lambda self: bucket))
        made.append(Pair(kind, tmp_path / "weights", **more))
        return made[-1]

    yield join
    for pair in made:
        asyncio.run(pair.close())


BOTH = pytest.mark.parametrize("kind", ["p2p", "disk"])
SHARES = st.sampled_from([0.0, None, 0.01, 0.1, 0.5, 1.0])


@BOTH
@pytest.mark.parametrize("dtypes", [("bfloat16",) * 2, ("float32",) * 2, ("float32", "bfloat16")], ids="/".join)
@pytest.mark.parametrize("place", ["host", "device"])
def test_any_sequence_of_changes_arrives_bit_by_bit(join, kind, dtypes, place):
    pair = join(kind, 3000, trainer=3, engines=(2, 1), dtypes=dtypes, delta=place)
    asyncio.run(pair.push())
    shares = set()

    @settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow])
    @given(sequence=st.lists(SHARES, min_size=1, max_size=4), seed=st.integers(0, 1000))
    def run(sequence, seed):
        for share in sequence:
            pair.change(share, seed)
            report = asyncio.run(pair.push())
            assert pair.equal()
            shares.add(report.details["delta"])

    run()
    assert max(shares) > 0.5


async def test_first_update_is_whole_and_the_next_tells_changes(join):
    pair = join(trainer=3, engines=(2, 1), dtypes=("bfloat16", "bfloat16"))
    first = await pair.push()
    assert first.details == {"delta": 0.0}
    assert first.bytes == sum(pair.transfer._made[1].pairs().values())
    pair.change(0.01)
    second = await pair.push()
    assert second.bytes < first.bytes / 5
    assert second.details["delta"] > 0.9
    assert 0.002 < second.details["changed"] < 0.03
    assert second.metrics()["transfer/changed"] == second.details["changed"]
    assert pair.equal()


@BOTH
async def test_dense_changes_fall_back_to_all_bytes(join, kind):
    pair = join(kind, trainer=2, engines=(2,), dtypes=("bfloat16", "bfloat16"))
    first = await pair.push()
    for seed in (1, 2):
        pair.change(1.0, seed)
        report = await pair.push()
        assert report.bytes == first.bytes
        assert report.details == {"delta": 0.0, "changed": 1.0}
        assert pair.equal()
    pair.change(None)
    assert (await pair.push()).bytes < first.bytes / 5
    assert pair.equal()


async def test_fall_back_is_message_by_message(join):
    pair = join(bucket=1500, dtypes=("bfloat16", "bfloat16"))
    whole = (await pair.push()).bytes
    storage = pair.world.source.ranks[0].weights.tensors()["embed"]
    storage[3:1000] = -1 - torch.arange(997.0)
    report = await pair.push()
    assert 0.3 < report.details["delta"] < 0.9
    assert 0.1 * whole < report.bytes < 0.7 * whole
    assert pair.equal()


@BOTH
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_signs_of_zero_and_payloads_of_nan_arrive(join, kind, dtype):
    pair = join(kind, dtypes=(dtype, dtype))
    storage = pair.world.source.ranks[0].weights.tensors()["embed"]
    storage[3:] = 0.0
    storage[20:40] = float("nan")
    await pair.push()
    storage[5] = -0.0
    storage.view(INTS[storage.dtype])[30] += 1
    report = await pair.push()
    assert round(report.details["changed"] * sum(torch.Size(shape).numel() for shape in SHAPES.values())) == 2
    held = pair.world.weights[0].tensors()["embed"]
    assert torch.equal(held.view(INTS[held.dtype]), storage.view(INTS[held.dtype]))


class Counting:
    """A group that counts what it is given to carry."""

    def __init__(self, group, sent):
        self._group, self._sent = group, sent

    def send(self, tensors, peer, tag):
        self._sent.append(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return self._group.send(tensors, peer, tag)

    def recv(self, tensors, peer, tag):
        return self._group.recv(tensors, peer, tag)

    def abort(self):
        self._group.abort()


async def test_bytes_of_the_report_are_those_that_the_groups_carry(join, monkeypatch):
    sent, weights = [], Groups._weights
    monkeypatch.setattr(Groups, "_weights", lambda self, *args: Counting(weights(self, *args), sent))
    pair = join(bucket=2000, trainer=3, engines=(2, 3), dtypes=("bfloat16", "bfloat16"))
    for share in (0.0, 0.02, 0.3, 1.0, None):
        pair.change(share)
        sent.clear()
        report = await pair.push()
        assert report.bytes == sum(sent) > 0


async def test_bytes_of_the_report_are_those_that_engines_read_from_disk(join, tmp_path):
    pair = join("disk", trainer=2, engines=(1, 1), dtypes=("bfloat16", "bfloat16"))
    await pair.push()
    pair.change(0.02)
    report = await pair.push()
    [told] = [json.loads(file.read_text()) for file in tmp_path.glob("*/*/version-1.2/manifest.json")]
    lengths = [entry.get("delta") for file in told["files"].values() for entry in file["tensors"].values()]
    large = sum(length for length in lengths if length)
    small = 2 * lengths.count(None)  # scalars
    assert report.bytes == 2 * (large + small)
    assert told["base"] == "1.1"


async def test_engines_that_want_the_same_share_one_base(join):
    pair = join(trainer=2, engines=(1, 1, 1))
    for _ in range(2):
        await pair.push()
        pair.change(0.02)
    held = [
        sum(part.numel() for part in rank._made["p2p"]._sessions[pair.transfer.session].bases._parts.values())
        for rank in pair.world.source.ranks
    ]
    assert sum(held) == pair.transfer._made[1].bytes


# ---- who may build on what
async def settled(pair):
    """Push until both sides have a base, and change a little."""
    await pair.push()
    pair.change(0.01, 1)
    assert (await pair.push()).details["delta"] > 0.5
    pair.change(0.01, 2)


async def fails(pair, words, **more):
    with pytest.raises(TransferError, match=words):
        await pair.push(**more)


async def healed(pair):
    """Check that the next update is whole and right, and the one after builds on it."""
    report = await pair.push()
    assert report.details == {"delta": 0.0}
    assert pair.equal()
    pair.change(0.01, 3)
    assert (await pair.push()).details["delta"] > 0.5
    assert pair.equal()


@BOTH
async def test_update_that_failed_in_an_engine_is_not_built_on(join, kind):
    pair = join(kind, trainer=2, engines=(1, 2))
    await settled(pair)
    pair.world.weights[1].broken = True
    await fails(pair, "this rank broke")
    await healed(pair)


@BOTH
async def test_update_that_failed_after_all_bytes_were_there_is_not_built_on(join, kind, monkeypatch):
    pair = join(kind, trainer=2, engines=(1, 1))
    await settled(pair)
    with monkeypatch.context() as patch:

        def refresh():
            message = "no memory for caches"
            raise PowertrainError(message)

        patch.setattr(pair.world.weights[1], "refresh", refresh)
        await fails(pair, "no memory for caches")
    await healed(pair)


@BOTH
async def test_update_whose_trainer_failed_is_not_built_on(join, kind):
    pair = join(kind, trainer=2, engines=(1, 1))
    await settled(pair)
    pair.world.source.ranks[1].weights.broken = True
    await fails(pair, "this trainer broke")
    pair.world.source.ranks[1].weights.broken = False
    await healed(pair)


@BOTH
async def test_cancelled_update_is_not_built_on(join, kind):
    pair = join(kind, trainer=2, engines=(1, 1))
    await settled(pair)
    stuck = pair.world.weights[1]
    stuck.stuck = True
    task = asyncio.ensure_future(pair.push())
    while stuck.state != "updating":
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0.05)
    stuck.stuck = False
    stuck.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await healed(pair)


@BOTH
@pytest.mark.parametrize("side", ["source", "sink"])
async def test_rank_that_was_started_anew_gets_all(join, kind, side):
    pair = join(kind, trainer=1, engines=(1, 1))
    await settled(pair)
    handle, new = (pair.world.source, Source) if side == "source" else (pair.world.sinks[1], Sink)
    handle.ranks[0].close()
    handle.ranks[:] = pair.world.ranks(new, 1)
    with contextlib.suppress(TransferError):
        await pair.push()
        assert pair.equal()
        pytest.fail("a rank that knows of no pair took part")
    await healed(pair)


@BOTH
async def test_engine_that_joins_or_leaves_makes_the_next_update_whole(join, kind):
    pair = join(kind, trainer=2, engines=(1, 1))
    await settled(pair)
    both = pair.transfer.sinks
    for sinks in (both[:1], both):
        pair.transfer.sinks = sinks
        assert (await pair.push()).details == {"delta": 0.0}
    assert pair.equal()


@BOTH
async def test_base_of_another_version_is_refused_in_words(join, kind, monkeypatch):
    pair = join(kind, trainer=2, engines=(1, 1))
    await settled(pair)
    for rank in pair.world.sinks[1].ranks:
        rank._made[kind]._sessions[pair.transfer.session].bases.version = "1.1"
    with monkeypatch.context() as patch:

        async def agree(**more):
            return "1.2"

        patch.setattr(pair.transfer, "_agree", agree)
        await fails(pair, r"changes (since|of) version 1\.2.*holds 1\.1; the next update (sends all|writes all values)")
    await healed(pair)


@BOTH
async def test_base_that_one_rank_lost_makes_the_update_whole(join, kind):
    pair = join(kind, trainer=2, engines=(1, 1))
    await settled(pair)
    for rank in pair.world.sinks[1].ranks:
        rank._made[kind]._sessions[pair.transfer.session].bases.version = "1.1"
    await healed(pair)


@BOTH
async def test_adapter_between_takes_nothing_from_a_base(join, kind):
    pair = join(kind)
    await settled(pair)
    weights = pair.world.source.ranks[0].weights
    full = weights._manifest
    weights._manifest = dataclasses.replace(full, kind="adapter")
    report = await pair.push(kind="adapter", adapter="policy-v1.3")
    assert report.details == {}
    weights._manifest = full
    await healed(pair)


@BOTH
async def test_verified_updates_tell_changes_too(join, kind):
    pair = join(kind, trainer=2, engines=(2,), verify=1)
    await settled(pair)
    report = await pair.push()
    assert report.details["delta"] > 0.5
    pair.world.weights[1].refresh = lambda: None
    bases = pair.world.sinks[0].ranks[1]._made[kind]._sessions[pair.transfer.session].bases
    next(iter(bases._parts.values())).view(torch.int32)[3] ^= 1
    await fails(pair, "weights differ from the trainer's")
    await healed(pair)


# ---- what the trainer casts
@BOTH
async def test_trainer_casts_to_what_all_engines_hold(join, kind):
    pair = join(kind, trainer=2, engines=(2, 1), dtypes=("float32", "bfloat16"))
    plain = join(kind, trainer=2, engines=(2, 1), dtypes=("float32", "bfloat16"), delta="off")
    for one in (pair, plain):
        torch.manual_seed(0)
        for rank in one.world.source.ranks:
            for tensor in rank.weights.tensors().values():
                tensor[3:].normal_()
    reports = [await one.push() for one in (pair, plain)]
    assert 2 * reports[0].bytes == reports[1].bytes
    for mine, theirs in zip(pair.world.weights, plain.world.weights, strict=True):
        for name, tensor in mine.tensors().items():
            assert torch.equal(tensor.view(torch.int16), theirs.tensors()[name].view(torch.int16))
    for rank in pair.world.source.ranks:
        for tensor in rank.weights.tensors().values():
            tensor[3:] *= 1 + 1e-6
    report = await pair.push()
    assert report.details["changed"] < 0.01
    assert pair.equal()


async def test_trainer_does_not_cast_where_engines_differ(join):
    pair = join(engines=(1, 1), dtypes=("float32", "bfloat16"))
    become(pair.world.weights[1], "float32")
    assert (await pair.push()).bytes == 2 * 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert pair.equal()


async def test_trainer_does_not_cast_what_an_engine_transforms(join):
    pair = join(dtypes=("float32", "bfloat16"))
    weights = pair.world.weights[0]
    entries = [
        dataclasses.replace(entry, transform="squeeze") if entry.name == "norm" else entry
        for entry in weights._manifest
    ]
    weights._manifest = dataclasses.replace(weights._manifest, entries=tuple(entries))
    plan = await pair.transfer.plan(pair.world.source, pair.world.sinks, deadline=DEADLINE)
    assert {block.name: block.dtype for block in plan.blocks} == {
        name: "float32" if name == "norm" else "bfloat16" for name in SHAPES
    }
    assert await pair.transfer.plan(pair.world.source, pair.world.sinks, deadline=DEADLINE) == plan


# ---- on disk
async def test_version_of_changes_is_a_safetensors_file_that_names_its_base(join, tmp_path):
    pair = join("disk", trainer=2, dtypes=("bfloat16", "bfloat16"))
    await settled(pair)
    files = sorted(tmp_path.glob("*/*/version-1.2/*.safetensors"))
    found = [load_file(file) for file in files]
    assert sorted(name for one in found for name in one if "embed" in name) == [
        "embed[0:34, 0:33].delta",
        "embed[34:67, 0:33].delta",
    ]
    for one in found:
        for name, tensor in one.items():
            assert (tensor.dtype == torch.uint8) is name.endswith(".delta")
    assert [path.name for path in chain(files[0].parent)] == ["version-1.2", "version-1.1"]


async def test_whoever_opens_a_version_gets_all_its_values(join, tmp_path):
    pair = join("disk", trainer=2, keep=0, dtypes=("bfloat16", "bfloat16"))
    for seed in range(4):
        await pair.push()
        wanted = whole([rank.weights for rank in pair.world.source.ranks])
        [newest] = tmp_path.glob(f"*/*/version-1.{pair.counter}")
        found = load_version(newest)
        embed = torch.cat([found["embed[0:34, 0:33]"], found["embed[34:67, 0:33]"]])
        assert torch.equal(embed.view(torch.int16), wanted["embed"].view(torch.int16))
        assert torch.equal(found["scalar"].view(torch.int16), wanted["scalar"].view(torch.int16))
        pair.change(0.02, seed)
    assert len(chain(newest)) == 4
    file = next(newest.parent.glob("version-1.1/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(TransferError, match="has another checksum than it was written with"):
        load_version(newest)


@pytest.mark.parametrize("keep", [0, 1, 3])
async def test_what_a_version_builds_on_stays_beside_it(join, tmp_path, keep):
    pair = join("disk", keep=keep)
    for seed in range(5):
        await pair.push()
        pair.change(None, seed)
    names = [path.name for path in tmp_path.glob("*/*/version-*")]
    assert sorted(names) == [f"version-1.{n}" for n in range(1, 6)]
    pair.change(1.0)
    await pair.push()
    await pair.push()
    names = sorted(path.name for path in tmp_path.glob("*/*/version-*"))
    assert (
        names
        == {
            0: ["version-1.6", "version-1.7"],
            1: ["version-1.6", "version-1.7"],
            3: [f"version-1.{n}" for n in range(1, 8)],
        }[keep]
    )


@pytest.mark.parametrize("keep", [3, 5, 9])
async def test_no_version_goes_before_there_are_more_than_are_kept(join, tmp_path, keep):
    pair = join("disk", keep=keep, delta="off")
    for _ in range(5):
        await pair.push()
    assert len(list(tmp_path.glob("*/*/version-*"))) == min(5, keep + 1)


async def test_all_values_are_written_again_when_changes_have_become_heavy(join, tmp_path):
    pair = join("disk", dtypes=("bfloat16", "bfloat16"))
    told = []
    for seed in range(12):
        pair.change(0.4, seed)
        told.append((await pair.push()).details["delta"])
    assert told[0] == 0.0
    assert told.count(0.0) in {2, 3}
    assert max(len(chain(path)) for path in tmp_path.glob("*/*/version-*")) <= 6
    assert pair.equal()


@pytest.mark.parametrize("damage", ["flip", "cut"])
async def test_damaged_changes_are_told_while_engines_answer_and_the_next_is_whole(join, tmp_path, monkeypatch, damage):
    pair = join("disk", trainer=2, engines=(1, 1))
    await settled(pair)
    versions = pair.world.versions
    seal = Folder.seal

    def spoil(self, *args):
        path = seal(self, *args)
        [file] = path.glob("rank-1-*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1 if len(data) % 2 else -2] ^= 1
        file.write_bytes(data if damage == "flip" else data[:-8])
        return path

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "seal", spoil)
        with pytest.raises(TransferError, match=r"has checksum|bytes and was written with") as caught:
            await pair.push()
    assert caught.value.unfit == ()
    assert pair.world.versions == versions
    await healed(pair)


async def test_damaged_changes_on_the_wire_make_the_next_update_whole(join, monkeypatch):
    pair = join(trainer=2, engines=(1, 1))
    await settled(pair)
    encode = delta.encode

    def spoilt(*args):
        data, count = encode(*args)
        if data is not None:
            data[0] = 9
        return data, count

    with monkeypatch.context() as patch:
        patch.setattr(delta, "encode", spoilt)
        await fails(pair, "changed values arrived damaged: a part is written in way 9")
    await healed(pair)


@pytest.mark.parametrize("counters", [(1, 1, 2), (1, 2, 1, 3), (1, 2, 3, 2)])
async def test_a_version_written_again_takes_along_those_that_build_on_it(join, tmp_path, counters):
    pair, wanted = join("disk", keep=9), {}
    for seed, counter in enumerate(counters):
        pair.change(0.01, seed)
        await pair.transfer.push(Update(version=WeightVersion(1, counter)), deadline=DEADLINE)
        assert pair.equal()
        wanted[f"version-1.{counter}"] = whole([rank.weights for rank in pair.world.source.ranks])["embed"]
        kept = list(tmp_path.glob("*/*/version-*"))
        assert f"version-1.{counter}" in [path.name for path in kept]
        for path in kept:
            assert torch.equal(load_version(path)["embed"].view(torch.int32), wanted[path.name].view(torch.int32))
