"""Transfers `local` and `shm`: what arrives, what is shared, and what is left after a failure."""

import gc
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch

from powertrain.errors import ConfigError, StateError, TransferError
from powertrain.tensors import shm as shm_module
from powertrain.tensors.area import PREFIX, Area, sweep
from powertrain.tensors.local import LocalTransfer
from powertrain.tensors.shm import ShmTransfer
from powertrain.weights import Update, WeightVersion

sys.path.append(str(Path(__file__).parent))
from transfer_world import SHAPES, Handle, Process, Source, inline_sink, inline_source, pair, value

DEADLINE = 60.0


def update(counter, **more):
    return Update(version=WeightVersion(1, counter), **more)


def local(**options):
    return LocalTransfer("local", {"share": "auto", "synchronous": False, **options})


def shm(tmp_path, **options):
    return ShmTransfer("shm", {"bucket_mb": 1, "folder": str(tmp_path), **options})


def check(handle, step):
    sink = handle.ranks[0].weights
    for name in SHAPES:
        assert torch.equal(sink.tensors()[name], value(name, step)), name


def left(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["local", "shm"])
async def test_every_sink_gets_the_trainers_values(kind, tmp_path):
    source, sinks = inline_source(), [inline_sink("rollout/0"), inline_sink("rollout/1")]
    transfer = pair(local() if kind == "local" else shm(tmp_path), source, sinks)
    total = sum(value(name, 0).numel() * 4 for name in SHAPES)
    for step in range(3):
        report = await transfer.push(update(step + 1), deadline=DEADLINE)
        for sink in sinks:
            check(sink, step)
        assert report.bytes == total * (2 if kind == "local" else 1)
        assert sinks[0].ranks[0].weights.version == f"1.{step + 1}"
        source.ranks[0].weights.train()
    assert sinks[0].ranks[0].weights.tensors()["embed"].data_ptr() != source.ranks[0].weights.named["embed"].data_ptr()
    await transfer.close()


async def test_a_set_of_one_rank_is_loaded_and_published_by_one_message():
    sink = inline_sink()
    report = await pair(local(), inline_source(), [sink]).push(update(1), deadline=DEADLINE)
    assert sink.called == ["weights.manifest", "series"]
    assert {phase: report.seconds[phase] for phase in ("pause", "load", "finish", "resume")} == dict.fromkeys(
        ("pause", "load", "finish", "resume"), 0.25
    )
    assert sink.ranks[0].weights.version == "1.1"


async def test_no_engine_of_a_set_is_published_before_all_have_finished():
    source, sinks = inline_source(), [inline_sink("rollout/0"), inline_sink("rollout/1")]
    transfer = pair(local(), source, sinks)
    await transfer.push(update(1), deadline=DEADLINE)
    assert [sink.called[-2:] for sink in sinks] == [["series", "resume"]] * 2
    source.ranks[0].weights.train()
    sinks[1].ranks[0].weights.break_once()
    with pytest.raises(
        TransferError, match=r"failed in phase 'load': this rank broke; unfit.*: rollout/0, rollout/1"
    ) as info:
        await transfer.push(update(2), deadline=DEADLINE)
    assert (info.value.phase, sorted(info.value.unfit)) == ("load", ["rollout/0", "rollout/1"])
    assert {sink.ranks[0].weights.version for sink in sinks} == {"1.1"}
    await transfer.push(update(3), deadline=DEADLINE)
    check(sinks[0], 1)
    check(sinks[1], 1)


async def test_a_manifest_is_asked_for_once_and_again_after_a_failure():
    source, sink = inline_source(), inline_sink()
    transfer = pair(local(), source, [sink])
    for counter in (1, 2):
        await transfer.push(update(counter), deadline=DEADLINE)
    assert source.called.count("weights.manifest") == 1
    sink.ranks[0].weights.break_once()
    with pytest.raises(TransferError):
        await transfer.push(update(3), deadline=DEADLINE)
    await transfer.push(update(4), deadline=DEADLINE)
    assert source.called.count("weights.manifest") == 2


async def test_synchronous_local_shares_and_guards():
    source, sink = inline_source(), inline_sink()
    transfer = pair(local(synchronous=True), source, [sink])
    report = await transfer.push(update(1), deadline=DEADLINE)
    weights, trainer = sink.ranks[0].weights, source.ranks[0].weights
    assert report.bytes == 0
    assert weights.tensors()["embed"].data_ptr() == trainer.named["embed"].data_ptr()
    trainer.train()
    with pytest.raises(StateError, match="push first"):
        weights.guard()
    await transfer.push(update(2), deadline=DEADLINE)
    weights.guard()
    check(sink, 1)


def test_sharing_without_synchronous_rollouts_is_refused():
    with pytest.raises(ConfigError, match="synchronous"):
        local(share="yes")


async def test_share_no_copies_in_a_synchronous_run():
    source, sink = inline_source(), inline_sink()
    transfer = pair(local(share="no", synchronous=True), source, [sink])
    assert (await transfer.push(update(1), deadline=DEADLINE)).bytes > 0
    source.ranks[0].weights.train()
    check(sink, 0)


async def test_local_without_its_source_says_use_shm():
    source, sink = inline_source(), inline_sink()
    transfer = pair(local(), source, [sink])
    plan = await transfer.plan(source, [sink], deadline=DEADLINE)
    sink.ranks[0].weights.begin(update(1))
    with pytest.raises(TransferError, match="use shm"):
        await transfer._call(sink, "take", reads=plan.reads[0][0], share="no", deadline=DEADLINE)


@pytest.mark.parametrize("kind", ["local", "shm"])
async def test_adapter_arrives_whole_under_its_name(kind, tmp_path):
    source, sink = inline_source(), inline_sink()
    source.ranks[0].weights.become_adapter()
    transfer = pair(local() if kind == "local" else shm(tmp_path), source, [sink])
    await transfer.push(update(2, kind="adapter", adapter="policy-v1.2"), deadline=DEADLINE)
    weights = sink.ranks[0].weights
    source.ranks[0].weights.train()
    assert {n: torch.equal(t, value(n, 0)) for n, t in weights.adapters["policy-v1.2"].items()} == dict.fromkeys(
        SHAPES, True
    )
    assert (weights.base_version, weights.version) == ("1.0", "1.2")


async def test_update_of_another_kind_than_the_trainer_sends_is_refused(tmp_path):
    transfer = pair(shm(tmp_path), inline_source(), [inline_sink()])
    with pytest.raises(TransferError, match="kind 'full' and the update is of kind 'adapter'"):
        await transfer.push(update(2, kind="adapter", adapter="p-v1.2"), deadline=DEADLINE)


async def test_slow_sink_reads_its_bucket_before_it_is_written_again(tmp_path, monkeypatch):
    """B03: one sink copies late; no bucket may hold the next one's numbers, nothing may alias the area."""
    monkeypatch.setattr(ShmTransfer, "bucket_bytes", property(lambda self: 256))
    monkeypatch.setattr(shm_module, "SLOTS", 1)
    source, sinks = inline_source(), [inline_sink("rollout/0"), inline_sink("rollout/1", slow=0.02)]
    transfer = pair(shm(tmp_path), source, sinks)
    await transfer.push(update(1), deadline=DEADLINE)
    area = source.ranks[0].endpoints["shm"]._sessions[transfer.session].area
    assert len((await transfer.plan(source, sinks, deadline=DEADLINE)).buckets) > 2
    area._bytes.fill_(9)
    for sink in sinks:
        check(sink, 0)
        begin, end = area._bytes.data_ptr(), area._bytes.data_ptr() + area._bytes.numel()
        assert all(not begin <= t.data_ptr() < end for t in sink.ranks[0].weights.tensors().values())
    await transfer.close()


async def test_area_is_kept_from_update_to_update_and_leaves_no_file(tmp_path):
    source, sink = inline_source(), inline_sink()
    transfer = pair(shm(tmp_path), source, [sink])
    await transfer.push(update(1), deadline=DEADLINE)
    area = source.ranks[0].endpoints["shm"]._sessions[transfer.session].area
    assert left(tmp_path) == []
    await transfer.push(update(2), deadline=DEADLINE)
    assert source.ranks[0].endpoints["shm"]._sessions[transfer.session].area is area
    await transfer.close()
    await transfer.close()
    gc.collect()
    assert not any(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())


async def test_failed_sink_is_unfit_and_healed_by_the_next_update(tmp_path):
    source, sinks = inline_source(), [inline_sink("rollout/0"), inline_sink("rollout/1")]
    transfer = pair(shm(tmp_path), source, sinks)
    await transfer.push(update(1), deadline=DEADLINE)
    sinks[1].ranks[0].weights.break_once()
    source.ranks[0].weights.train()
    with pytest.raises(TransferError, match="this rank broke") as caught:
        await transfer.push(update(2), deadline=DEADLINE)
    assert (caught.value.phase, set(caught.value.unfit)) == ("load", {"rollout/0", "rollout/1"})
    await transfer.push(update(3), deadline=DEADLINE)
    for sink in sinks:
        check(sink, 1)
        assert sink.ranks[0].weights.version == "1.3"


async def test_restarted_sink_gets_the_area_anew(tmp_path):
    source, sink = inline_source(), inline_sink()
    transfer = pair(shm(tmp_path), source, [sink])
    await transfer.push(update(1), deadline=DEADLINE)
    sink.ranks[:] = inline_sink().ranks
    with pytest.raises(TransferError, match="restarted"):
        await transfer.push(update(2), deadline=DEADLINE)
    await transfer.push(update(3), deadline=DEADLINE)
    check(sink, 0)


async def test_full_folder_is_told_with_both_numbers(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    transfer = pair(shm(tmp_path), inline_source(), [inline_sink()])
    with pytest.raises(TransferError, match=r"bytes free and the staging area needs \d+.*bucket_mb"):
        await transfer.push(update(1), deadline=DEADLINE)
    assert left(tmp_path) == []


def test_sweep_takes_what_the_dead_left_and_nothing_else(tmp_path):
    (tmp_path / f"{PREFIX}1-dead").write_bytes(b"x")
    (tmp_path / "other").write_bytes(b"x")
    area = Area.create(tmp_path, "alive", 4096, 1)
    sweep(tmp_path)
    assert left(tmp_path) == ["other", f"{PREFIX}{os.getpid()}-alive"]
    area.close()
    sweep(tmp_path)
    assert left(tmp_path) == ["other"]


@pytest.fixture
def processes():
    """Start two sharded training ranks and two engines, each rank in a process of its own."""
    ranks = [Process("source", 0, 2), Process("source", 1, 2), Process("sink", 0, 1), Process("sink", 0, 1)]
    yield ranks
    for rank in ranks:
        rank.stop()
    assert not any(rank.process.is_alive() for rank in ranks)


async def test_two_training_ranks_fill_two_engines_over_four_processes(processes, tmp_path):
    source = Handle("actor", processes[:2])
    sinks = [Handle(f"rollout/{i}", [rank]) for i, rank in enumerate(processes[2:])]
    for sink in sinks:
        await sink.call("publish", "1.0", deadline=DEADLINE)
    transfer = pair(shm(tmp_path), source, sinks)
    for step in range(2):
        report = await transfer.push(update(step + 1), deadline=DEADLINE)
        assert report.bytes == sum(value(name, 0).numel() * 4 for name in SHAPES)
        for sink in sinks:
            [values] = await sink.call("values", deadline=DEADLINE)
            assert all(torch.equal(values[name], value(name, step)) for name in SHAPES)
        await source.call("train", deadline=DEADLINE)
    assert left(tmp_path) == []
    await source.call("become_adapter", deadline=DEADLINE)
    await transfer.push(update(3, kind="adapter", adapter="policy-v1.3"), deadline=DEADLINE)
    [values] = await sinks[1].call("adapter_values", "policy-v1.3", deadline=DEADLINE)
    assert all(torch.equal(values[name], value(name, 2)) for name in SHAPES)
    await transfer.close()


def make_and_die(folder):
    """Make an area and end without a word."""
    Area.create(Path(folder), "victim", 4096, 1)
    os._exit(9)


def test_killed_owner_leaves_a_file_that_is_swept(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=make_and_die, args=(str(tmp_path),))
    process.start()
    process.join(30)
    assert [name.endswith("-victim") for name in left(tmp_path)] == [True]
    sweep(tmp_path)
    assert left(tmp_path) == []


def test_uneven_shards_stay_whole():
    assert [len(Source(rank, 4).named["embed"]) for rank in range(4)] == [3, 3, 3, 1]
