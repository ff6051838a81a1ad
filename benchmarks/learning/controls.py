"""Rewards from which nothing can be learnt: if accuracy rose under them, the benchmark would measure something else."""

import random

from powertrain_ppo.tasks import exact

_SEEN: list[float] = []
_DRAW = random.Random(20260101)


def constant(record, text, tokens):
    """Return 1 for every completion."""
    return 1.0


def shuffled(record, text, tokens):
    """Return the exact reward of another completion, drawn from the last 128: right rewards on wrong samples."""
    drawn = _DRAW.choice(_SEEN) if _SEEN else float(_DRAW.random() < 0.3)
    _SEEN.append(exact(record, text, tokens))
    del _SEEN[:-128]
    return drawn
