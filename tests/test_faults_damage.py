"""A damaged checkpoint, a loss that is not a number, a reward that raises or hangs: a clear end, and nothing lost."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("powertrain_fsdp")
pytest.importorskip("powertrain_hf")
pytest.importorskip("powertrain_ppo")

sys.path.append(str(Path(__file__).parent))
from faults_world import World, steady

from powertrain.cli.main import main
from powertrain.env import determinism_variables

FILES = ("recipe.json", "trainer/state.json", "trainer/random-0.pt", "trainer/shards/.metadata")
SHARD = "trainer/shards/__0_0.distcp"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return World(tmp_path_factory.mktemp("damage"))


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    """Set what the command sets before the interpreter starts; on CPU nothing reads it."""
    for name, value in determinism_variables(5, {}).items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def runs(world):
    """Return an unbroken run of four steps, and one of two steps that can be copied."""
    recipe = world.recipe("fsdp:d1|hf:d1")
    patch = pytest.MonkeyPatch()
    with patch.context() as context:
        for name, value in determinism_variables(5, {}).items():
            context.setenv(name, value)
        for name, steps in (("whole", 4), ("short", 2)):
            words = ["--folder", world.folder / name, f"ppo.steps={steps}", "ppo.eval_every=1", "ppo.export=false"]
            assert main(["run", str(recipe), *map(str, words)]) == 0
    return world.folder / "whole", world.folder / "short"


@pytest.fixture
def short(runs, tmp_path):
    """Return a copy of the run of two steps."""
    return Path(shutil.copytree(runs[1], tmp_path / "run"))


def resume(folder, *words):
    return main(["resume", str(folder), "ppo.steps=4", *words])


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]


HARM = {
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "empty": lambda file: file.write_bytes(b""),
    "gone": lambda file: file.unlink(),
    "one bit": lambda file: file.write_bytes(flip(file.read_bytes())),
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("name", [*FILES, SHARD])
def test_damaged_checkpoint_is_never_loaded(short, capsys, name, harm):
    newest = short / "checkpoints" / "step-000002"
    HARM[harm](newest / name)
    metrics = (short / "metrics.jsonl").read_text()
    assert resume(short) == 1
    told = capsys.readouterr().err
    assert Path(name).name in told
    assert f"move {newest} elsewhere: `powertrain resume` then goes on from step-000001" in told
    assert "Traceback" not in told
    assert (short / "metrics.jsonl").read_text() == metrics


def test_resume_goes_on_from_the_earlier_checkpoint_once_the_damaged_one_is_away(runs, short):
    shutil.rmtree(short / "checkpoints" / "step-000002")
    assert resume(short) == 0
    assert steady(short) == steady(runs[0])


def test_without_any_other_checkpoint_the_run_can_begin_anew(runs, short, capsys):
    shutil.rmtree(short / "checkpoints" / "step-000001")
    shard = short / "checkpoints" / "step-000002" / SHARD
    HARM["half"](shard)
    assert resume(short) == 1
    assert "then begins anew, since no earlier checkpoint is there" in capsys.readouterr().err
    shutil.rmtree(short / "checkpoints" / "step-000002")
    assert resume(short) == 0
    assert steady(short) == steady(runs[0])


@pytest.mark.parametrize(
    ("word", "back", "said"),
    [
        (
            "ppo.loss=faults_losses:nan",
            "ppo.loss=powertrain_ppo.losses:grpo",
            ["step 3: the loss is nan", "the step was not taken and the weights are as they were", "optim.lr"],
        ),
        (
            "ppo.reward=mine.py:unknown_name",
            "ppo.reward=mine.py:sevens",
            ["raised KeyError: 'answer' at", 'mine.py:8 in unknown_name: return len(record["answer"])', "row prompt="],
        ),
        (
            "ppo.reward=mine.py:nothing",
            "ppo.reward=mine.py:sevens",
            ["reward 'mine.py:nothing' returned None, not a finite number, for the row prompt="],
        ),
    ],
    ids=["nan loss", "raising reward", "reward without a number"],
)
def test_failed_step_is_explained_and_taken_again(runs, short, capsys, word, back, said):
    kept = sorted((short / "checkpoints").rglob("*"))
    assert resume(short, word) == 1
    told = capsys.readouterr().err
    assert [text for text in said if text.lower() not in told.lower()] == []
    assert "Traceback" not in told
    assert f"powertrain resume {short}` goes on from the last checkpoint" in told
    assert sorted((short / "checkpoints").rglob("*")) == kept
    assert resume(short, back) == 0
    assert steady(short) == steady(runs[0])


@pytest.mark.timeout(200)
def test_hanging_reward_does_not_keep_the_command_alive(world):
    recipe = world.recipe("fsdp:d1|hf:d1")
    words = ["ppo.reward=mine.py:hangs", "ppo.reward_deadline=0.3"]
    ended = world.run("run", recipe, "--folder", world.folder / "hangs", *words)
    assert ended.code == 1
    assert "reward 'mine.py:hangs' gave no answer within 0.3 s (reward_deadline) for the row prompt=" in ended.err
    assert "begins it anew, since no checkpoint was saved yet" in ended.err
