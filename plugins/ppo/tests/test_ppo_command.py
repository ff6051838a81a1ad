"""`powertrain run` and `powertrain resume` as a user calls them, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("powertrain_fsdp")
pytest.importorskip("powertrain_hf")

COMMAND = [sys.executable, "-c", "import sys; from powertrain.cli import main; sys.exit(main())"]
REWARD = """
import json, os, pathlib, time
here = pathlib.Path(__file__).parent

def told(record, text, tokens):
    names = ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS", "MINE", "POWERTRAIN_STARTED_AGAIN")
    (here / "seen.json").write_text(json.dumps({name: os.environ.get(name) for name in names}))
    return len(text)

calls = 0

def slow(record, text, tokens):
    # The second step's rewards wait for the test to interrupt the run.
    global calls
    calls += 1
    if calls > 5 + 12 and not (here / "go").exists():
        (here / "waiting").touch()
        while not (here / "go").exists():
            time.sleep(0.01)
    return len(text)
"""


def powertrain(*words, **kwargs):
    env = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG")
    }
    return subprocess.run(
        [*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=240, check=False, env=env, **kwargs
    )


def test_dry_run_starts_nothing(recipe_file, tmp_path):
    code = (
        "import sys; from powertrain.cli import main; status = main();"
        "print(*(name for name in ('torch', 'transformers', 'powertrain_hf.engine') if name in sys.modules));"
        "sys.exit(status)"
    )
    words = ["run", str(recipe_file), "--dry-run", "engines=fsdp:d2|hf:d2", f"runs={tmp_path / 'runs'}"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("\n\n")
    assert "hf/1 (hf, infer) rank 0: slot 1 (cpu), worker hf-1-r0" in done.stdout
    assert "fsdp (fsdp, train) rank 1: slot 1 (cpu), worker fsdp-r1" in done.stdout
    assert "weights fsdp -> hf: shm" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("engines=fsdp:d1", "recipe ppo needs one infer part"),
        ("ppo.reward=mine.py:lenght", "reward: mine.py has no 'lenght'"),
        ("ppo.data=nowhere.jsonl", "nowhere.jsonl"),
        ("ppo.loss=powertrain_ppo.losses:grpoo", "did you mean 'grpo'?"),
        ("hf.head_fp32=false", "the LM head is float32 in training and the model's dtype in inference"),
    ],
)
def test_dry_run_refuses_what_the_run_would(recipe_file, word, said):
    done = powertrain("run", recipe_file, "--dry-run", word)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_one_sides_head_may_differ_when_the_recipe_says_so(recipe_file):
    done = powertrain("run", recipe_file, "--dry-run", "hf.head_fp32=false", "head_mismatch=allow")
    assert done.returncode == 0, done.stderr


def test_dry_run_prints_a_file_that_runs_as_it_is(recipe_file, tmp_path):
    first = powertrain("run", recipe_file, "--dry-run", "optim.lr=1e-3")
    (tmp_path / "printed.yaml").write_text(first.stdout)
    assert powertrain("run", tmp_path / "printed.yaml", "--dry-run").stdout == first.stdout
    assert "in the driver's process" in first.stdout


def test_faults_are_told_and_nothing_is_made(recipe_file, tmp_path):
    done = powertrain("run", recipe_file, "ppo.stepps=1", "sed=1", f"runs={tmp_path / 'runs'}")
    assert done.returncode == 2
    assert "did you mean 'steps'" in done.stderr
    assert "did you mean 'seed'" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_inline_engines_find_their_variables_at_the_start(recipe_file, tmp_path):
    (tmp_path / "told.py").write_text(REWARD)
    done = powertrain(
        "run", recipe_file, "--folder", tmp_path / "run", "ppo.steps=1", "ppo.reward=told.py:told", "env.MINE=a=b, c"
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0] == f"starting fsdp:d1|hf:d1 in {tmp_path / 'run'}"
    assert said[-2].startswith("held-out accuracy ")
    assert said[-1] == f"run folder: {tmp_path / 'run'}"
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["PYTHONHASHSEED"] == "5"
    assert seen["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert seen["OMP_NUM_THREADS"]
    assert seen["MINE"] == "a=b, c"
    assert seen["POWERTRAIN_STARTED_AGAIN"] is None


@pytest.mark.parametrize(("number", "background"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_interrupted_run_says_how_to_go_on(recipe_file, tmp_path, number, background):
    """A shell makes what it runs in the background ignore Ctrl-C; ending it by SIGTERM must be as clean."""
    (tmp_path / "slow.py").write_text(REWARD)
    folder = tmp_path / "run"
    words = ["run", recipe_file, "--folder", folder, "ppo.reward=slow.py:slow", "ppo.export=false"]
    command = [*COMMAND, *map(str, words)]
    if background:
        command = ["bash", "-c", "trap '' INT; exec \"$@\"", "bash", *command]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        watcher = (
            f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'waiting')!r}).exists(): time.sleep(0.02)"
        )
        subprocess.run([sys.executable, "-c", watcher], timeout=60, check=True)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"powertrain resume {folder}" in said
    (tmp_path / "go").touch()
    done = powertrain("resume", folder)
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3]


def test_failed_run_tells_where_to_look(recipe_file, tmp_path):
    done = powertrain("run", recipe_file, "--folder", tmp_path / "run", "ppo.reward=mine.py:nothing")
    assert done.returncode == 1
    assert "error: reward 'mine.py:nothing' returned nan" in done.stderr
    assert f"powertrain resume {tmp_path / 'run'}` begins it anew, since no checkpoint was saved yet" in done.stderr
    assert "RewardError" in (tmp_path / "run" / "logs" / "driver.log").read_text()


def test_resume_refuses_what_is_no_run(tmp_path):
    done = powertrain("resume", tmp_path)
    assert done.returncode == 2
    assert "not a run folder" in done.stderr


@pytest.mark.parametrize(
    "word", ["ppo.reward=mine.py:sevenss", "ppo.group_size=1", "ppo.loss=powertrain_ppo.losses:no"]
)
def test_resume_that_is_refused_has_not_stopped_a_run(recipe_file, tmp_path, word):
    folder = tmp_path / "run"
    for name in ("logs", "checkpoints"):
        (folder / name).mkdir(parents=True)
    resolved = powertrain("run", recipe_file, "--dry-run").stdout
    (folder / "config.yaml").write_text(resolved)
    done = powertrain("resume", folder, word)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {word.partition('=')[0]}")
    assert "resume" not in done.stderr
    assert (folder / "config.yaml").read_text() == resolved


def test_folder_of_another_run_is_not_written_into(recipe_file, tmp_path):
    (tmp_path / "run").mkdir()
    done = powertrain("run", recipe_file, "--folder", tmp_path / "run")
    assert done.returncode == 2
    assert "is there already" in done.stderr


def test_usage_error_names_what_is_required_alone(tmp_path):
    done = powertrain("run")
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith("required: RECIPE.yaml")


def test_full_disk_is_told_without_a_trace(recipe_file, tmp_path):
    folder = tmp_path / "run"
    assert powertrain("run", recipe_file, "--folder", folder, "ppo.steps=1", "ppo.export=false").returncode == 0
    for name in ("versions.part", "logs/driver.log"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/full")
    done = powertrain("resume", folder, "ppo.steps=2")
    assert done.returncode == 1
    assert "failed: the disk is full; make room" in done.stderr
    assert "Traceback" not in done.stderr
