from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from powertrain.errors import CheckpointError, ConfigError, DeadlineError, WorkerError
from powertrain.run.folder import RunFolder
from powertrain.run.metrics import read_metrics


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(tmp_path / "runs", "sums") as run:
        run.write("config.yaml", "recipe: x\n")
        yield run


def save(folder, step, text="x", keep_last=3):
    with folder.checkpoint(step, keep_last=keep_last) as path:
        (path / "state").write_text(text)


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    with RunFolder.create(tmp_path, "a") as one, RunFolder.create(tmp_path, "a") as two:
        assert one.path != two.path


@pytest.mark.parametrize("name", ["", "a/b", ".hidden"])
def test_name_that_is_no_folder_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be named"):
        RunFolder.create(tmp_path, name)


def test_second_driver_is_kept_out(folder):
    code = f"from powertrain.run.folder import RunFolder; RunFolder.open({str(folder.path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "another driver (process" in done.stderr
    assert done.returncode != 0


def test_closed_folder_opens_again(folder):
    folder.close()
    RunFolder.open(folder.path).close()


def test_folder_without_config_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        RunFolder.open(tmp_path)


def test_checkpoint_appears_whole(folder):
    with folder.checkpoint(1, keep_last=3) as path:
        (path / "state").write_text("x")
        assert folder.latest() is None
    step, done = folder.latest()
    assert (step, done.name) == (1, "step-000001")
    assert (done / "state").read_text() == "x"


def test_failed_checkpoint_leaves_no_trace(folder):
    with pytest.raises(KeyError), folder.checkpoint(1, keep_last=3):
        raise KeyError
    assert list(folder.checkpoints.iterdir()) == []


def test_newest_checkpoints_are_kept(folder):
    for step in (1, 2, 10, 3):
        save(folder, step, keep_last=2)
    assert [step for step, _ in folder.complete()] == [3, 10]


def test_step_saved_again_takes_the_new_content(folder):
    save(folder, 1, "old")
    save(folder, 1, "new")
    assert (folder.latest()[1] / "state").read_text() == "new"


def test_half_written_checkpoint_is_cleared_on_open(folder):
    (folder.checkpoints / ".step-000009.part").mkdir()
    folder.close()
    with RunFolder.open(folder.path) as again:
        assert again.latest() is None
        assert list(again.checkpoints.iterdir()) == []


@pytest.mark.parametrize(("code", "word"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only")])
def test_full_and_readonly_disks_are_explained(folder, code, word):
    with pytest.raises(CheckpointError, match=word), folder.checkpoint(1, keep_last=1):
        raise OSError(code, "x")


@pytest.mark.parametrize("kind", [WorkerError, CheckpointError])
def test_full_disk_that_a_rank_met_is_explained_too(folder, kind):
    told = kind("fsdp rank 1: CheckpointException: Traceback ...\nOSError: [Errno 28] No space left on device\n")
    with pytest.raises(CheckpointError, match=r"failed: the disk is full; .* runs=FOLDER$") as caught:  # noqa: SIM117
        with folder.checkpoint(1, keep_last=1):
            raise told
    assert caught.value.__cause__ is told


def test_other_faults_of_a_rank_keep_their_words(folder):
    with pytest.raises(WorkerError, match="Errno 5"), folder.checkpoint(1, keep_last=1):
        raise WorkerError("OSError: [Errno 5] Input/output error")


def test_missed_deadline_keeps_its_own_words(folder):
    with pytest.raises(DeadlineError, match="rank 3"), folder.checkpoint(1, keep_last=1):
        raise DeadlineError("rank 3 is late")


def test_changed_config_keeps_the_earlier_one(folder):
    folder.write_config("recipe: x\n")
    folder.write_config("recipe: y\n")
    assert folder.config_file.read_text() == "recipe: y\n"
    assert [path.read_text() for path in folder.path.glob("config.*.yaml")] == ["recipe: x\n"]


def test_line_is_on_disk_before_the_next_step(folder):
    folder.log(1, {"reward": 0.1, "bad": float("nan")})
    assert read_metrics(folder.metrics_file) == [{"step": 1, "reward": 0.1, "bad": None}]


def test_rewind_keeps_what_it_cuts(folder):
    for step in range(4):
        folder.log(step, {"reward": step / 3})
    folder.rewind(2)
    assert [row["step"] for row in read_metrics(folder.metrics_file)] == [0, 1, 2]
    assert [row["step"] for row in read_metrics(folder.path / "metrics.jsonl.cut-1")] == [0, 1, 2, 3]
    folder.rewind(1)
    assert (folder.path / "metrics.jsonl.cut-2").exists()


def test_rewind_to_the_end_cuts_nothing(folder):
    folder.log(1, {"reward": 0.1})
    before = folder.metrics_file.read_text()
    folder.rewind(1)
    assert folder.metrics_file.read_text() == before
    assert not list(folder.path.glob("*.cut-*"))


def test_torn_last_line_is_cut(folder):
    folder.log(1, {"reward": 0.1})
    with folder.metrics_file.open("a") as stream:
        stream.write('{"step": 2, "rew')
    folder.rewind(5)
    assert [row["step"] for row in read_metrics(folder.metrics_file)] == [1]
    assert not folder.metrics_file.read_text().endswith("rew")


def test_damaged_line_is_named(folder):
    folder.metrics_file.write_text('{"step": 1}\nhello\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match="line 2"):
        folder.rewind(1)
