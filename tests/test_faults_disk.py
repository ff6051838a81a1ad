"""A disk that fills up at the worst moments, a limit of file sizes, a read-only file system: one clear line each."""

from __future__ import annotations

import contextlib
import importlib
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("powertrain_fsdp")
pytest.importorskip("powertrain_hf")
pytest.importorskip("powertrain_ppo")

sys.path.append(str(Path(__file__).parent))
from faults_world import World, small_disk, steady

from powertrain.cli.main import main
from powertrain.env import determinism_variables

FULL = "failed: the disk is full; make room, or choose another folder with runs=FOLDER\n"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """Return a small file system of its own."""
    folder = tmp_path_factory.mktemp("small")
    yield from small_disk(folder, "4m")


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Set what the command sets before the interpreter starts; on CPU nothing reads it."""
    for name, value in determinism_variables(5, {}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def run(world):
    """Return a function that runs or resumes three steps in a folder."""

    def call(command, folder, *words):
        where = [world.recipe("fsdp:d1|hf:d1"), "--folder", folder] if command == "run" else [folder]
        given = ["ppo.steps=3", "ppo.eval_every=1", "keep_last=1", *words]
        return main([command, *map(str, [*where, *given])])

    return call


@pytest.fixture
def strike(monkeypatch):
    """Return a function that lets something happen once, before a certain call of `module:function`."""

    def arm(at, call, act):
        module, _, name = at.partition(":")
        owner = importlib.import_module(module)
        function, calls = getattr(owner, name), 0

        def counting(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == call:
                act()
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    return arm


def fill(folder):
    with contextlib.suppress(OSError), (folder / "fill").open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))


@pytest.mark.parametrize(
    ("at", "call", "words", "failed"),
    [
        ("powertrain_fsdp.checkpoint:_tensors", 2, (), "checkpoints/step-000002"),
        ("powertrain_fsdp.checkpoint:_random_states", 2, (), "checkpoints/step-000002"),
        ("powertrain_ppo.recipe:save_state", 1, (), "checkpoints/step-000001"),
        ("powertrain_fsdp.export:_write_model", 1, (), "export"),
        ("powertrain_fsdp.export:_write_adapter", 1, ("lora.rank=2",), "export"),
    ],
    ids=["shards", "random state", "recipe's state", "model", "adapter"],
)
def test_full_disk_is_told_and_the_run_goes_on_when_there_is_room(run, disk, strike, capsys, at, call, words, failed):
    folder = disk / "run"
    try:
        strike(at, call, lambda: fill(disk))
        assert run("run", folder, *words) == 1
        told = capsys.readouterr().err
        assert f"error: writing {folder / failed} {FULL}" in told
        assert "Traceback" not in told
        assert not list(folder.rglob("*.part"))
        (disk / "fill").unlink()
        assert run("resume", folder) == 0
        assert [row.startswith(f'{{"step": {step},') for step, row in enumerate(steady(folder))] == [True] * 4
        assert (folder / "export" / "config.json").exists() or words
    finally:
        shutil.rmtree(folder)
        (disk / "fill").unlink(missing_ok=True)


def test_line_of_metrics_that_did_not_fit_is_written_again(run, tmp_path, strike, capsys):
    """A limit of file sizes acts in the middle of a line, as a full disk may."""
    folder = tmp_path / "run"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    metrics = folder / "metrics.jsonl"

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.stat().st_size + 100, before[1]))

    strike("powertrain.run.folder:append_metrics", 3, limit)
    try:
        assert run("run", folder) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    told = capsys.readouterr().err
    assert f"error: writing {metrics} failed: a file would be larger than this user may write (ulimit -f)" in told
    assert not metrics.read_text().endswith("\n")
    assert run("resume", folder) == 0
    assert len(steady(folder)) == 4


def test_read_only_folder_is_told_and_left_as_it_is(run, disk, capsys):
    folder = disk / "kept"
    assert run("run", folder, "ppo.steps=1") == 0
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        said = "failed: the file system is read-only; choose another folder with runs=FOLDER\n"
        assert run("resume", folder) == 2
        assert capsys.readouterr().err == f"error: locking '{folder}' {said}"
        assert run("run", disk / "new") == 2
        assert capsys.readouterr().err == f"error: making the run folder '{disk / 'new'}' {said}"
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert run("resume", folder) == 0
    assert len(steady(folder)) == 4
