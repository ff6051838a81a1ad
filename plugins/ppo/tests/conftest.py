"""A tiny random model with a tokenizer of single characters, and a configuration that trains it."""

from __future__ import annotations

import json

import pytest

from powertrain.env import determinism_variables

CHARACTERS = "0123456789+= "

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
    """Return the folder of a two-layer Llama whose vocabulary is `CHARACTERS` and an end token."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny") / "model"
    words = {word: i for i, word in enumerate(["<end>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
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
