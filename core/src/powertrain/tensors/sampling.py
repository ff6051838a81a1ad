"""Drawing tokens: a pure function of logits and one uniform number per row, which depends on nothing else in the batch.

The uniform number of a token comes from (seed, request id, sample, position) alone, so the same request draws the same
numbers in any batch; the token is the inverse of the distribution's cumulative sum there.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_UNIT = 2.0**-42
"""Resolution of running sums: weights of at most 1 stay within int64 up to a vocabulary of 2**21."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each (key, position): SplitMix64 (Steele, Lea, Flood 2014) at a counter."""
    with np.errstate(over="ignore"):
        x = keys + (positions + np.uint64(1)) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _MIX1
        x = (x ^ (x >> np.uint64(27))) * _MIX2
        x ^= x >> np.uint64(31)
    numbers: NDArray[np.float64] = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def uniforms_on(keys: Tensor, positions: Tensor) -> Tensor:
    """As `uniforms`, of int64 tensors [R] (keys as their bits), on their device; float64 [R], bit for bit the same."""
    x = keys + (positions + 1) * _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(_MIX1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX2)
    return _shifted(x ^ _shifted(x, 31), 11).to(torch.float64) * 2.0**-53


def _signed(number: np.uint64) -> int:
    return int(number) - (1 << 64) if number >> np.uint64(63) else int(number)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift right as an unsigned number."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def draw(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token for each row of float32 logits [R, V].

    temperature float32 [R] (0 is greedy), top_k int64 [R] (0 is off), top_p float32 [R] (1 is off),
    uniform float64 [R].
    Returns tokens int64 [R], and float32 [R] their log-probs under the distribution they were drawn from (0 for a
    greedy row, whose distribution is one point) and under temperature 1 with nothing cut off.
    """
    # Sums of exponentials are taken in float64: float32's log_softmax is off by 1e-5, to one side, over a vocabulary.
    # Heights below the peak stay finite at every temperature above 0.
    height = logits - logits.amax(-1, keepdim=True)
    greedy = temperature == 0
    heat = torch.where(greedy, 1.0, temperature)
    cut = ((top_k > 0) | (top_p < 1)) & ~greedy
    shaped = height / heat[:, None] if bool((heat != 1).any()) else height
    weights = shaped.exp()
    if bool(cut.any()):
        rows = cut.nonzero()[:, 0]
        weights[rows] = _cut(shaped[rows], top_k[rows], top_p[rows])
    total = _cumulated(weights)  # in the order of token ids
    mass = total[:, -1:].clone()
    tokens = torch.searchsorted(total, uniform[:, None] * mass, right=True).clamp_(max=logits.shape[1] - 1)
    if bool(greedy.any()):
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    drawn = shaped.gather(1, tokens) - mass.log()
    plain = drawn
    if shaped is not height or bool(cut.any()):
        plain = height.gather(1, tokens) - height.exp().sum(-1, keepdim=True, dtype=torch.float64).log()
    logprobs = torch.where(greedy[:, None], 0.0, drawn)
    return tokens[:, 0], logprobs[:, 0].float(), plain[:, 0].float()


def _cut(shaped: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return exp(shaped) of the top_k likeliest tokens, and of those of the fewest that reach top_p; 0 elsewhere."""
    ordered, order = shaped.sort(dim=-1, descending=True, stable=True)
    weights = ordered.exp()
    rank = torch.arange(shaped.shape[1], device=shaped.device)
    limit = torch.where(top_k > 0, top_k, shaped.shape[1])
    weights.masked_fill_(rank >= limit[:, None], 0.0)
    reached = _cumulated(weights)
    off = (reached - weights >= top_p.double()[:, None] * reached[:, -1:]) & (top_p < 1)[:, None]
    off[:, 0] = False
    return torch.empty_like(shaped).scatter_(1, order, weights.masked_fill_(off, 0.0))


def _cumulated(weights: Tensor) -> Tensor:
    """Return float64 running sums [R, V] of weights from 0 to 1.

    On a card they are added up as whole numbers of `_UNIT`, whose sum is the same in any order. torch documents its
    running sum of floats there as refused under determinism (2.11 carries it out all the same).
    """
    if weights.device.type == "cpu":
        return weights.to(torch.float64).cumsum(-1)
    return (weights.to(torch.float64) / _UNIT).round_().to(torch.int64).cumsum(-1).to(torch.float64) * _UNIT
