"""The option `verify`: checksums that see every wrong word, and updates that end when one is wrong."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from powertrain.errors import TransferError
from powertrain.tensors import verify
from powertrain.tensors.disk import DiskTransfer
from powertrain.tensors.local import LocalTransfer
from powertrain.tensors.shm import ShmTransfer
from powertrain.tensors.verify import Comparison, checksum, checksums
from powertrain.weights import Box, Entry, Manifest, Update, WeightVersion, plan_transfer

sys.path.append(str(Path(__file__).parent))
from transfer_world import SHAPES, inline_sink, inline_source, pair, value

DEADLINE = 30.0


def update(counter, **more):
    return Update(version=WeightVersion(1, counter), **more)


def made(kind, folder, **options):
    classes = {"local": LocalTransfer, "shm": ShmTransfer, "disk": DiskTransfer}
    return classes[kind](kind, {"folder": str(folder), **options})


@given(st.integers(0, 40), st.integers(1, 255), st.data())
def test_every_wrong_byte_shows(count, flip, data):
    tensor = torch.arange(count + 1, dtype=torch.uint8)
    other = tensor.clone()
    other[data.draw(st.integers(0, count))] ^= flip
    assert int(checksum("w", tensor)) != int(checksum("w", other))


def test_names_and_order_count():
    tensor = torch.arange(64, dtype=torch.int64)
    assert int(checksum("w", tensor)) != int(checksum("v", tensor))
    assert int(checksum("w", tensor)) != int(checksum("w", tensor.flip(0)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.bool, torch.int64])
def test_strides_do_not_count(dtype):
    tensor = torch.arange(77).reshape(7, 11).to(dtype)
    assert int(checksum("w", tensor.t().contiguous().t())) == int(checksum("w", tensor))


def test_parts_are_summed_like_a_whole(monkeypatch):
    """A short last part, and what lies behind the first, must count."""
    monkeypatch.setattr(verify, "_WORDS", 4)
    tensor = torch.arange(75, dtype=torch.uint8)
    sums = {int(checksum("w", tensor))}
    for at in range(75):
        other = tensor.clone()
        other[at] += 1
        sums.add(int(checksum("w", other)))
    swapped = torch.cat([tensor[32:64], tensor[:32], tensor[64:]])
    assert len(sums | {int(checksum("w", swapped))}) == 77


@pytest.mark.parametrize("kind", ["local", "shm", "disk"])
async def test_right_weights_pass(kind, tmp_path):
    source, sinks = inline_source(), [inline_sink("rollout/0"), inline_sink("rollout/1")]
    transfer = pair(made(kind, tmp_path, verify=1), source, sinks)
    for counter in (1, 2):
        await transfer.push(update(counter), deadline=DEADLINE)
    for sink in sinks:
        assert all(torch.equal(sink.ranks[0].weights.tensors()[name], value(name, 0)) for name in SHAPES)
    assert source.called.count("endpoint.call") > 2


def spoil(sink, name="embed"):
    """Let a sink's next load leave one wrong number."""
    weights = sink.ranks[0].weights
    apply = weights.apply

    def wrong(pieces):
        apply(pieces)
        weights.tensors()[name].view(-1)[0] += 1

    weights.apply = wrong


@pytest.mark.parametrize("kind", ["local", "shm", "disk"])
async def test_wrong_value_ends_the_update_and_names_the_tensor(kind, tmp_path):
    source, sinks = inline_source(), [inline_sink("rollout/0"), inline_sink("rollout/1")]
    transfer = pair(made(kind, tmp_path, verify=1), source, sinks)
    spoil(sinks[1])
    with pytest.raises(TransferError, match=r"rollout/1: 'embed'\[0:10, 0:6\] has checksum .* on its rank 0") as caught:
        await transfer.push(update(1), deadline=DEADLINE)
    assert caught.value.phase == "load"
    assert "rollout/0: " not in str(caught.value)
    assert [sink.ranks[0].weights.version for sink in sinks] == ["1.0", "1.0"]
    del sinks[1].ranks[0].weights.apply
    await transfer.push(update(2), deadline=DEADLINE)
    assert [sink.ranks[0].weights.version for sink in sinks] == ["1.2", "1.2"]


@pytest.mark.parametrize(("every", "caught"), [(0, []), (1, [1, 2, 3, 4]), (3, [1, 4])])
async def test_it_is_done_every_nth_update(tmp_path, every, caught):
    transfer = pair(made("shm", tmp_path, verify=every), inline_source(), [inline_sink()])
    spoil(transfer.sinks[0])
    found = []
    for counter in (1, 2, 3, 4):
        try:
            await transfer.push(update(counter), deadline=DEADLINE)
        except TransferError:
            found.append(counter)
    assert found == caught


def test_ranges_are_found_by_the_ranks_own_manifest():
    class Weights:
        def manifest(self):
            return Manifest(0, 1, (Entry("w", "float32", (4, 3), (Box((0, 0), (4, 3), "s", 2, (3, 1)),)),))

        def tensors(self):
            return {"s": torch.arange(14.0)}

    whole = torch.arange(2.0, 14.0).reshape(4, 3)
    wanted = [("w", "w", (1, 1), (2, 2), "bfloat16", False), ("w", "a", (0, 0), (3, 4), "", True)]
    right = [checksum("w", whole[1:3, 1:].bfloat16()), checksum("a", whole.t())]
    assert checksums(Weights(), wanted) == [int(one) for one in right]
    with pytest.raises(TransferError, match=r"'w'\[3:5, 0:1\] is to be verified, and rank 0 has it nowhere"):
        checksums(Weights(), [("w", "w", (3, 0), (2, 1), "", False)])


def test_what_the_engine_converts_is_left_out():
    def manifest(**more):
        box = Box((0,), (4,), "w", 0, (1,))
        return Manifest(0, 1, (Entry("w", more.pop("dtype", "bfloat16"), (4,), (box,), **more),))

    sink = manifest(dtype="float8_e4m3fn", accepts=("bfloat16",), transform="fp8_block")
    plan = plan_transfer([manifest()], [[sink]])
    assert Comparison.of(plan, [[manifest()], [sink]]).pairs == []
