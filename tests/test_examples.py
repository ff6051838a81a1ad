"""Every example is dry-run through the command line, and what it prints is a recipe file that means the same."""

import shutil
from pathlib import Path

import pytest

from powertrain.cli.main import main
from powertrain.run.config import load_config

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("**/*.yaml"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a copy of the examples in an empty folder, which is also the current one."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_are_examples():
    assert {path.name for path in EXAMPLES} >= {"grpo_sums.yaml", "own_reward.yaml"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_is_accepted_and_starts_nothing(example, folder, capsys):
    file = folder / example.relative_to(ROOT)
    before = sorted(folder.rglob("*"))
    assert main(["run", str(file), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert [path for path in sorted(folder.rglob("*")) if path not in before and "__pycache__" not in path.parts] == []
    assert "# placement" in printed
    again = folder / "again.yaml"
    again.write_text(printed)
    assert load_config(again).to_mapping() == load_config(file).to_mapping()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_on_workers_too(example, folder, capsys):
    assert main(["run", str(folder / example.relative_to(ROOT)), "engines=fsdp:d2|hf:d2", "--dry-run"]) == 0
    assert capsys.readouterr().out.count("worker ") == 4
