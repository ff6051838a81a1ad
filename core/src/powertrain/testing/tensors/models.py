"""Tiny random models in HF format, made once a process, so that a plugin need bring none."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, Final

VOCAB: Final = 64
HIDDEN: Final = 32
LONGEST: Final = 512
"""Positions of the tiny models."""
_SIZES: Final = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least that engines have attention kernels for
    "max_position_embeddings": LONGEST,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="powertrain-testing-")


@functools.cache
def tiny_model(seed: int = 0, *, tied: bool = True) -> str:
    """Return the folder of a Llama of 2 layers with random float32 weights and a tokenizer of one word a token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from powertrain.tensors.models import quietly

    state = torch.get_rng_state()
    torch.manual_seed(seed)
    sizes: Any = {**_SIZES, "tie_word_embeddings": tied}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    torch.set_rng_state(state)
    folder = Path(_root().name) / f"llama-{seed}-{'tied' if tied else 'untied'}"
    with quietly():
        model.save_pretrained(folder)
    _tokenizer(folder)
    return str(folder)


def _tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


CHARACTERS: Final = "0123456789+= "
"""What the models of `character_model` can say."""


def character_tokenizer(folder: Path) -> int:
    """Write a tokenizer of one token a character of `CHARACTERS`, with `<end>` as token 0; returns its size."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<end>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>").save_pretrained(folder)
    return len(words)


def character_model(folder: Path, **changes: Any) -> None:
    """Write a two-layer Llama with `character_tokenizer`, for recipes whose rewards read text."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {
        "vocab_size": character_tokenizer(folder),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(sizes | changes))).save_pretrained(folder)


def scratch(name: str) -> Path:
    """Return a new empty folder that goes away with the process."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_root().name))


@functools.cache
def checkpoint(folder: str) -> dict[str, Any]:
    """Return HF name -> tensor of a model's folder as it lies there: tied weights once."""
    from safetensors.torch import load_file

    return dict(load_file(Path(folder) / "model.safetensors"))


@functools.cache
def plain_model(folder: str) -> Any:
    """Return the transformers model of a folder in float32 with eager attention, in eval mode; not to be changed."""
    from powertrain.tensors.models import load_causal_lm

    return load_causal_lm(folder, attention="eager").requires_grad_(False)
