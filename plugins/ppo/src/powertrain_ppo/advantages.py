"""Advantages within groups. A sample's group travels with it; nothing is found again by counting rows."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from powertrain.errors import ConfigError


def group_advantages(
    groups: Sequence[Hashable], rewards: Sequence[float], *, std: str = "population", eps: float = 1e-6
) -> list[float]:
    """Return (reward - mean of its group) / (deviation of its group + eps), in the order given.

    groups: each sample's group; members may stand anywhere, and a group that lost members counts with those it has.
    std: "population" divides by n under the root, "sample" by n - 1, "none" leaves the difference undivided. A group
    of one, or one whose rewards are all equal, gets exactly 0. GRPO's formula: DeepSeekMath, section 4.1.1.
    """
    if len(groups) != len(rewards):
        message = f"{len(groups)} group marks for {len(rewards)} rewards; there must be as many of both"
        raise ConfigError(message)
    members: dict[Hashable, list[float]] = {}
    for group, reward in zip(groups, rewards, strict=True):
        members.setdefault(group, []).append(float(reward))
    scale = {group: _mean_and_deviation(values, std) for group, values in members.items()}
    result = []
    for group, reward in zip(groups, rewards, strict=True):
        mean, deviation = scale[group]
        if deviation == 0.0:
            result.append(0.0)
        else:
            result.append((float(reward) - mean) / (1.0 if std == "none" else deviation + eps))
    return result


def _mean_and_deviation(values: Sequence[float], std: str) -> tuple[float, float]:
    if min(values) == max(values):
        return values[0], 0.0
    count = len(values)
    mean = math.fsum(values) / count
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (count - 1 if std == "sample" else count))
