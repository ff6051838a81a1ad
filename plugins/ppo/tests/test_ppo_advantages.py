from __future__ import annotations

import pytest

from powertrain.errors import ConfigError
from powertrain_ppo.advantages import group_advantages

# Reported case: prompt A lost one of four episodes, so that three rows of A and four of B lie end to end.
GROUPS = ["A"] * 3 + ["B"] * 4
REWARDS = [1, 0, 0, 1, 1, 0, 1]
RIGHT = {
    "population": [1.41421, -0.70711, -0.70711, 0.57735, 0.57735, -1.73205, 0.57735],
    "sample": [1.15470, -0.57735, -0.57735, 0.5, 0.5, -1.5, 0.5],
    "none": [2 / 3, -1 / 3, -1 / 3, 0.25, 0.25, -0.75, 0.25],
}


@pytest.mark.parametrize("std", RIGHT)
def test_partial_group_shifts_no_other(std):
    assert group_advantages(GROUPS, REWARDS, std=std, eps=1e-6) == pytest.approx(RIGHT[std], abs=1e-5)


def test_order_of_samples_does_not_matter():
    order = [4, 0, 6, 2, 3, 1, 5]
    found = group_advantages([GROUPS[i] for i in order], [REWARDS[i] for i in order], eps=1e-6)
    assert found == pytest.approx([RIGHT["population"][i] for i in order], abs=1e-5)


@pytest.mark.parametrize("rewards", [[0.1] * 3, [1 / 3] * 7, [5.0]])
def test_constant_group_gets_exactly_zero(rewards):
    assert group_advantages([0] * len(rewards), rewards) == [0.0] * len(rewards)


def test_group_sums_to_zero():
    found = group_advantages(GROUPS, [0.3, 0.9, 0.1, 5, 2, 1, -4])
    assert sum(found[:3]) == pytest.approx(0, abs=1e-12)
    assert sum(found[3:]) == pytest.approx(0, abs=1e-12)


def test_unequal_counts_are_refused_with_both():
    with pytest.raises(ConfigError, match="2 group marks for 1 rewards"):
        group_advantages([0, 0], [1.0])
