"""A tiny random model with a tokenizer of single characters, and a configuration that trains it."""

from __future__ import annotations

import json

import pytest

from powertrain.env import determinism_variables
from powertrain.testing.tensors.models import character_model

CONFIG = """
recipe: ppo
engines: fsdp:d1|hf:d1
model: {model}
device: cpu
seed: 5
optim: {{lr: 1.0e-2}}
ppo:
  steps: 3
  prompts_per_step: 3
  group_size: 4
  max_tokens: 4
  data: rows.jsonl
  reward: mine.py:sevens
  check: mine.py:begins_with_seven
  held_out: 5
  eval_batch: 2
  eval_every: 2
  save_every: 1
  plot: false
"""

REWARDS = """
def sevens(record, text, tokens):
    return text.count("7") / 4 + text.count("1") / 8

async def begins_with_seven(record, text, tokens):
    return text.startswith("7")

def nothing(record, text, tokens):
    return float("nan")
"""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return the folder of a two-layer Llama whose tokens are single characters."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    character_model(folder)
    return folder


@pytest.fixture
def recipe_file(tmp_path, tiny_model, monkeypatch):
    """Return a recipe file with its data and rewards beside it.

    The variables are those that the command line sets before the interpreter starts; on CPU nothing reads them.
    """
    for name, value in determinism_variables(5, {}).items():
        monkeypatch.setenv(name, value)
    rows = [{"prompt": f"{a}+{b}="} for a in range(6) for b in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.py").write_text(REWARDS)
    file = tmp_path / "tiny.yaml"
    file.write_text(CONFIG.format(model=tiny_model))
    return file
