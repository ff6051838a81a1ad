"""Drawing tokens: a pure function of logits and one uniform number per row, which depends on nothing else in the batch.

The uniform number of a token comes from (seed, request id, sample, position) alone, so the same request draws the same
numbers in any batch; the token is the inverse of the distribution's cumulative sum there.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def row_key(seed: int, request_id: str, sample: int) -> int:
    """Return the 64-bit key of one completion."""
    text = f"{seed}/{sample}/{request_id}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each (key, position): SplitMix64 (Steele, Lea, Flood 2014) at a counter."""
    with np.errstate(over="ignore"):
        x = keys + (positions + np.uint64(1)) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _MIX1
        x = (x ^ (x >> np.uint64(27))) * _MIX2
        x ^= x >> np.uint64(31)
    numbers: NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token for each row of float32 logits [R, V].

    temperature float32 [R] (0 is greedy), top_k int64 [R] (0 is off), top_p float32 [R] (1 is off),
    uniform float64 [R].
    Returns tokens int64 [R], and float32 [R] their log-probs under the distribution they were drawn from (0 for a
    greedy row, whose distribution is one point) and under temperature 1 with nothing cut off.
    """
    plain = logits.log_softmax(-1)
    greedy = temperature == 0
    heat = torch.where(greedy, 1.0, temperature)
    cut = ((top_k > 0) | (top_p < 1)) & ~greedy
    shaped = plain
    if bool((heat != 1).any()):
        shaped = (logits / heat[:, None]).log_softmax(-1)
    if bool(cut.any()):
        rows = cut.nonzero()[:, 0]
        shaped = shaped.clone() if shaped is plain else shaped
        shaped[rows] = _cut(shaped[rows], top_k[rows], top_p[rows])
    # Token ids in order, in float64: rounding of the sum moves a border by far less than that of the logits does.
    total = shaped.exp().to(torch.float64).cumsum(-1)
    tokens = torch.searchsorted(total, (uniform * total[:, -1])[:, None], right=True)[:, 0].clamp_(
        max=logits.shape[1] - 1
    )
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    index = tokens[:, None]
    logprobs = torch.where(greedy, 0.0, shaped.gather(1, index)[:, 0])
    return tokens, logprobs, plain.gather(1, index)[:, 0]


def _cut(logprobs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Keep the top_k likeliest tokens, then of those the fewest that together reach top_p; normalised again."""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[1], device=logprobs.device)
    limit = torch.where(top_k > 0, top_k, logprobs.shape[1])
    ordered = ordered.masked_fill(rank >= limit[:, None], -torch.inf).log_softmax(-1)
    probs = ordered.exp()
    before = probs.cumsum(-1) - probs
    off = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    off[:, 0] = False
    ordered = ordered.masked_fill(off, -torch.inf).log_softmax(-1)
    return torch.empty_like(logprobs).scatter_(1, order, ordered)
