"""Transfer `disk`: what lies on the disk, what goes again, and what damage does: nothing to the engines' weights."""

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from powertrain.errors import TransferError
from powertrain.tensors import disk_files
from powertrain.tensors.disk import DiskTransfer
from powertrain.tensors.disk_files import Clock, header
from powertrain.tensors.disk_folder import PREFIX, Folder, sweep
from powertrain.weights import Update, WeightVersion

sys.path.append(str(Path(__file__).parent))
from transfer_world import SHAPES, Handle, Process, Rank, RankSpec, Source, inline_sink, inline_source, pair, value

DEADLINE = 60.0


def update(counter, **more):
    return Update(version=WeightVersion(1, counter), **more)


def disk(tmp_path, **options):
    return DiskTransfer("disk", {"folder": str(tmp_path), "keep": 1, "bucket_mb": 1, **options})


def sharded(world):
    return Handle("actor", [Rank(Source(rank, world), RankSpec(rank=rank, world=world)) for rank in range(world)])


def state(sink):
    weights = sink.ranks[0].weights
    wrong = [name for name in SHAPES if not torch.equal(weights.tensors()[name], value(name, 0))]
    return weights.state, weights.version, bool(wrong)


def versions(tmp_path):
    return sorted(path.name for path in tmp_path.glob("*/version-*"))


async def test_files_are_safetensors_that_others_can_read(tmp_path):
    transfer = pair(disk(tmp_path), sharded(3), [inline_sink()])
    report = await transfer.push(update(1), deadline=DEADLINE)
    files = sorted(tmp_path.glob("*/version-1.1/*.safetensors"))
    assert [path.name for path in files] == [f"rank-{rank}-of-3.safetensors" for rank in range(3)]
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    rows = [found[f"embed[{begin}:{min(begin + 4, 10)}, 0:6]"] for begin in (0, 4, 8)]
    assert torch.equal(torch.cat(rows), value("embed", 0))
    assert torch.equal(found["scalar"], value("scalar", 0))
    with safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt", "version": "1.1"}
    assert report.bytes == sum(tensor.numel() * tensor.element_size() for tensor in found.values())


def test_header_is_a_multiple_of_eight_and_names_every_block():
    from powertrain.weights.plan import Block

    block = Block("w", "bfloat16", (0, 0), (2, 3), 0, "w", 0, (3, 1), 0, 0)
    head = header([("w", block), ("v", block)], {})
    assert len(head) % 8 == 0
    table = json.loads(head[8:])
    assert [table[name]["data_offsets"] for name in ("w", "v")] == [[0, 12], [12, 24]]


@pytest.mark.parametrize(("keep", "left"), [(0, ["4"]), (1, ["3", "4"]), (2, ["2", "3", "4"])])
async def test_old_versions_go(tmp_path, keep, left):
    transfer = pair(disk(tmp_path, keep=keep), inline_source(), [inline_sink()])
    for counter in (1, 2, 3, 4):
        await transfer.push(update(counter), deadline=DEADLINE)
    assert versions(tmp_path) == [f"version-1.{counter}" for counter in left]
    await transfer.close()
    assert len(versions(tmp_path)) == keep
    assert list(tmp_path.glob("*/partial-*")) == []


async def test_without_a_folder_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    transfer = pair(DiskTransfer("disk", {"folder": None}), inline_source(), [inline_sink()])
    await transfer.push(update(1), deadline=DEADLINE)
    assert len(versions(tmp_path)) == 1
    await transfer.close()
    assert list(tmp_path.iterdir()) == []


async def test_no_version_has_its_name_before_all_of_it_is_there(tmp_path, monkeypatch):
    seen = []
    seal = Folder.seal

    def look(self, version, manifest):
        seen.append(versions(tmp_path))
        path = seal(self, version, manifest)
        seen.append(sorted(file.name for file in path.iterdir()))
        return path

    monkeypatch.setattr(Folder, "seal", look)
    await pair(disk(tmp_path), sharded(2), [inline_sink()]).push(update(1), deadline=DEADLINE)
    assert seen == [[], ["manifest.json", "rank-0-of-2.safetensors", "rank-1-of-2.safetensors"]]


def truncate(folder):
    os.truncate(folder / "rank-1-of-2.safetensors", 200)


def flip(folder):
    path = folder / "rank-1-of-2.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def remove(folder):
    (folder / "rank-1-of-2.safetensors").unlink()


def forge(folder):
    told = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(told))


DAMAGE = [
    (truncate, r"'embed'\[?.* has 200 bytes and was written with \d+"),
    (flip, r"'?embed\[5:10, 0:6\] has checksum [0-9a-f]{8} and was written with [0-9a-f]{8}|'?norm.* has checksum"),
    (remove, "cannot be opened: No such file"),
    (forge, "manifest.json has another checksum"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[one.__name__ for one, _ in DAMAGE])
async def test_damage_is_told_and_the_old_version_stays(tmp_path, monkeypatch, damage, words):
    source, sinks = sharded(2), [inline_sink("rollout/0"), inline_sink("rollout/1")]
    transfer = pair(disk(tmp_path), source, sinks)
    seal = Folder.seal

    def spoil(self, version, manifest):
        path = seal(self, version, manifest)
        damage(path)
        return path

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "seal", spoil)
        with pytest.raises(TransferError, match=words) as caught:
            await transfer.push(update(1), deadline=DEADLINE)
    assert caught.value.phase == "gather"
    assert caught.value.unfit == ()
    assert [state(sink) for sink in sinks] == [("steady", "1.0", True)] * 2
    await transfer.push(update(2), deadline=DEADLINE)
    assert [state(sink) for sink in sinks] == [("steady", "1.2", False)] * 2


async def test_file_that_shrinks_after_its_check_leaves_the_engine_unfit(tmp_path, monkeypatch):
    source, sink = inline_source(), inline_sink()
    transfer = pair(disk(tmp_path), source, [sink])
    begin = sink.ranks[0].weights.begin

    def spoil(update):
        begin(update)
        (file,) = tmp_path.glob("*/version-1.1/*.safetensors")
        data = file.read_bytes()
        os.truncate(file, len(data) - 4)

    monkeypatch.setattr(sink.ranks[0].weights, "begin", spoil)
    with pytest.raises(TransferError, match=r"has \d+ bytes and was written with") as caught:
        await transfer.push(update(1), deadline=DEADLINE)
    assert caught.value.phase == "load"
    assert sink.ranks[0].weights.version == "1.0"
    monkeypatch.undo()
    await transfer.push(update(2), deadline=DEADLINE)
    assert state(sink) == ("steady", "1.2", False)


async def test_full_disk_is_told_with_both_numbers_and_leaves_nothing(tmp_path, monkeypatch):
    source, sink = inline_source(), inline_sink()
    transfer = pair(disk(tmp_path), source, [sink])

    def full(file, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("powertrain.tensors.disk.write_all", full)
        with pytest.raises(
            TransferError, match=r"trainer rank 0 could not write.*No space left.*bytes are free, its file needs \d+"
        ):
            await transfer.push(update(1), deadline=DEADLINE)
    assert state(sink) == ("steady", "1.0", True)
    assert list(tmp_path.glob("*/*-1.1")) == []
    await transfer.push(update(2), deadline=DEADLINE)
    assert state(sink) == ("steady", "1.2", False)


async def test_file_size_limit_is_a_full_disk_too(tmp_path):
    """A real limit of the system, in a process of its own: the write ends in the midst of the file."""
    script = """
import asyncio, resource, sys
sys.path.insert(0, sys.argv[2])
from test_disk import *
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
async def main():
    sink = inline_sink()
    try:
        await pair(disk(Path(sys.argv[1])), inline_source(), [sink]).push(update(1), deadline=60)
    except TransferError as exc:
        print(exc.phase, state(sink), exc)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.startswith("gather ('steady', '1.0', True) update to weight version 1.1 over 'disk' failed"), (
        done.stdout + done.stderr
    )
    assert "File too large" in done.stdout


async def test_folder_that_the_engine_does_not_see_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("powertrain.tensors.disk._SEEN_SECONDS", 0.05)
    seal = Folder.seal

    def elsewhere(self, version, manifest):
        return seal(self, version, manifest).with_name("not-there")

    monkeypatch.setattr(Folder, "seal", elsewhere)
    with pytest.raises(TransferError, match="the option `folder` must name one that the trainer and every engine see"):
        await pair(disk(tmp_path), inline_source(), [inline_sink()]).push(update(1), deadline=DEADLINE)


async def test_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TransferError, match="cannot make a folder for weights in"):
        await pair(disk(tmp_path / "file"), inline_source(), [inline_sink()]).push(update(1), deadline=DEADLINE)


async def test_slow_disk_ends_at_the_deadline_and_names_the_tensor(tmp_path, monkeypatch):
    def slow(descriptor, data):
        time.sleep(0.05)

    monkeypatch.setattr("powertrain.tensors.disk.write_all", slow)
    with pytest.raises(TransferError, match=r"trainer rank 0 was still at '.*' in phase 'gather' after 0.09 s"):
        await pair(disk(tmp_path), inline_source(), [inline_sink()]).push(update(1), deadline=0.1)


def test_clock_that_has_time_left_says_nothing():
    Clock(10.0, "rank 0", "load").check("'w'")


def test_sweep_takes_what_the_dead_left_and_nothing_else(tmp_path):
    (tmp_path / "other").mkdir()
    dead, alive = Folder.make("dead", str(tmp_path), 1), Folder.make("alive", str(tmp_path), 1)
    fcntl.flock(dead._lock, fcntl.LOCK_UN)
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", f"{PREFIX}alive"]
    alive.close()
    alive.close()


def test_big_blocks_are_read_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_files, "CHUNK", 16)
    monkeypatch.setattr("powertrain.tensors.disk.CHUNK", 16)
    import asyncio

    sink = inline_sink()
    asyncio.run(pair(disk(tmp_path), sharded(2), [sink]).push(update(1), deadline=DEADLINE))
    assert state(sink) == ("steady", "1.1", False)


@pytest.fixture
def processes():
    """Start three sharded training ranks and two engines, each rank in a process of its own."""
    ranks = [*(Process("source", rank, 3) for rank in range(3)), Process("sink", 0, 1), Process("sink", 0, 1)]
    yield ranks
    for rank in ranks:
        rank.stop()


async def test_three_uneven_ranks_fill_two_engines_over_five_processes(processes, tmp_path):
    source, sinks = Handle("actor", processes[:3]), [Handle(f"rollout/{i}", [processes[3 + i]]) for i in range(2)]
    for sink in sinks:
        await sink.call("publish", "1.0", deadline=DEADLINE)
    transfer = pair(disk(tmp_path, verify=1), source, sinks)
    for step in range(3):
        await transfer.push(update(step + 1), deadline=DEADLINE)
        for sink in sinks:
            [values] = await sink.call("values", deadline=DEADLINE)
            assert all(torch.equal(values[name], value(name, step)) for name in SHAPES)
        await source.call("train", deadline=DEADLINE)
    processes[1].process.kill()
    processes[1].process.join(10)
    with pytest.raises(TransferError):
        await transfer.push(update(4), deadline=DEADLINE)
    assert await sinks[0].call("version", deadline=DEADLINE) == ["1.3"]
    assert await sinks[0].call("state", deadline=DEADLINE) == ["steady"]
