"""Between text and token ids: the chat template, the stop tokens, and the decoded completion."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from powertrain.errors import ConfigError


class Prompts:
    """A model folder's tokenizer as the recipe uses it; lives in the driver.

    stop: further texts that end a completion, each a single token.
    """

    def __init__(self, folder: str | Path, stop: Sequence[str] = ()) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(folder))
        self.stop_ids = tuple(sorted({*_end_tokens(Path(folder), self.tokenizer), *map(self._single, stop)}))
        if not self.stop_ids:
            message = f"the tokenizer in {str(folder)!r} names no end token; give one with the option ppo.stop"
            raise ConfigError(message)

    def encode(self, record: Mapping[str, Any]) -> list[int]:
        """Return the ids of a record's prompt: text as it is, messages through the chat template.

        Messages that end with the assistant's are continued; others get the opening of an answer.
        """
        prompt = record["prompt"]
        if not isinstance(prompt, str):
            if not self.tokenizer.chat_template:
                message = (
                    "the prompts are chat messages, but the model's tokenizer has no chat template; give them as text"
                )
                raise ConfigError(message)
            opened = prompt[-1]["role"] == "assistant"
            prompt = self.tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=not opened, continue_final_message=opened
            )
            ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer(prompt)["input_ids"]
        if not ids:
            message = f"the prompt {record['prompt']!r} has no token"
            raise ConfigError(message)
        return [int(token) for token in ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return a completion's text without special tokens."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def _single(self, text: str) -> int:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            parts = " + ".join(repr(self.tokenizer.decode([token])) for token in ids[:8])
            message = f"ppo.stop: text {text!r} is {len(ids)} tokens of this model ({parts}); each text must be one"
            raise ConfigError(message)
        return int(ids[0])


def _end_tokens(folder: Path, tokenizer: Any) -> set[int]:
    """Return the tokenizer's end token and those of the model's generation config."""
    found = {tokenizer.eos_token_id}
    config = folder / "generation_config.json"
    if config.is_file():
        given = json.loads(config.read_text(encoding="utf-8")).get("eos_token_id")
        found |= set(given) if isinstance(given, list) else {given}
    return {int(token) for token in found if token is not None}
