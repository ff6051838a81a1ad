"""Completions on their way: what an inference engine keeps of each row, and the key of its draws. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from powertrain.errors import ConfigError
from powertrain.interfaces.data import Completion, Segment

if TYPE_CHECKING:
    from powertrain.interfaces.data import GenerateRequest


def row_key(seed: int, request_id: str, sample: int) -> int:
    """Return the 64-bit key of one completion."""
    text = f"{seed}/{sample}/{request_id}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def check_prompt(request: GenerateRequest, vocabulary: int) -> None:
    """Raise ConfigError for token ids outside of a model's vocabulary."""
    least, most, last = int(request.prompt.min()), int(request.prompt.max()), vocabulary - 1
    if least < 0 or most > last:
        message = f"prompt of {request.request_id!r} holds {least} to {most}; it needs token ids from 0 to {last}"
        raise ConfigError(message)


@dataclass(eq=False, slots=True)
class Row:
    """One completion on its way. cuts: (first token, weight version) of each segment so far."""

    request: GenerateRequest
    sample: int
    prompt: list[int]
    key: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprobs_t1: list[float] = field(default_factory=list)
    cuts: list[tuple[int, str]] = field(default_factory=list)
    finish: str = ""

    @classmethod
    def of(cls, request: GenerateRequest) -> list[Row]:
        """Return a request's rows in sample order."""
        prompt = [int(token) for token in request.prompt]
        seed = request.sampling.seed
        return [cls(request, i, prompt, row_key(seed, request.request_id, i)) for i in range(request.sampling.n)]

    @property
    def room(self) -> int:
        """Tokens of KV cache that the row may need."""
        return len(self.prompt) + self.request.sampling.max_tokens

    def take(self, token: int, logprob: float, logprob_t1: float) -> None:
        """Append a drawn token and see whether the row ends with it."""
        sampling = self.request.sampling
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.logprobs_t1.append(logprob_t1)
        if token in sampling.stop_token_ids:
            self.finish = "stop"
        elif len(self.tokens) >= sampling.max_tokens:
            self.finish = "length"

    def label(self, version: str) -> None:
        """Say which weights the tokens from here on come from."""
        if self.cuts and self.cuts[-1][0] == len(self.tokens):
            self.cuts.pop()
        if not self.cuts or self.cuts[-1][1] != version:
            self.cuts.append((len(self.tokens), version))

    def completion(self) -> Completion:
        """Return what the row has."""
        ends = [start for start, _ in self.cuts[1:]] + [len(self.tokens)]
        segments = [Segment(s, e, version) for (s, version), e in zip(self.cuts, ends, strict=False) if e > s]
        return Completion(
            tokens=np.asarray(self.tokens, dtype=np.int64),
            logprobs=np.asarray(self.logprobs, dtype=np.float32),
            logprobs_t1=np.asarray(self.logprobs_t1, dtype=np.float32),
            finish=self.finish,
            segments=tuple(segments),
        )
