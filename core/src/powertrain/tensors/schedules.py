"""Learning-rate schedules, one meaning for every training engine.

The rate is a pure function of the step and the present configuration. A checkpoint holds the step alone, nothing of the
schedule: a run saved with warmup 10 and resumed with 50 has the learning rates of one that had 50 from its start.
"""

from __future__ import annotations

import math
from typing import Final

from powertrain.errors import ConfigError, Violations
from powertrain.interfaces.build import ScheduleSpec

KINDS: Final = ("constant", "linear", "cosine")


def learning_rate(step: int, peak: float, spec: ScheduleSpec) -> float:
    """Return the rate of one optimizer step, on every rank alike.

    step: optimizer steps already taken (0 for the first). peak: `OptimSpec.lr`. With W warmup steps, T total steps
    and floor m = min_ratio, the rate over peak is (step + 1) / W while step < W, so that no step is wasted on a rate
    of 0; then, with x = (step - W) / (T - W) held at most 1,

        constant 1      linear 1 - (1 - m) x      cosine m + (1 - m) (1 + cos(pi x)) / 2

    ConfigError as for `check_schedule`, and for a negative step.
    """
    warmup = check_schedule(spec)
    if step < 0:
        message = f"step is {step}; the first is 0"
        raise ConfigError(message)
    if step < warmup:
        return peak * (step + 1) / warmup
    if spec.kind == "constant" or spec.total_steps is None:
        return peak
    done = min(1.0, (step - warmup) / (spec.total_steps - warmup))
    fall = 1.0 - done if spec.kind == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return peak * (spec.min_ratio + (1.0 - spec.min_ratio) * fall)


def check_schedule(spec: ScheduleSpec) -> int:
    """Return the number of warmup steps; `Violations` with every fault of the spec, both numbers in each.

    warmup_steps wins when it is given, 0 meaning none. None means proportional: warmup_ratio * total_steps, rounded
    down. A warmup that leaves no step after it is refused for every kind, constant included where the total is known.
    """
    problems: list[str] = []
    if spec.kind not in KINDS:
        problems.append(f"schedule kind is {spec.kind!r}; it takes {', '.join(KINDS)}")
    for name in ("warmup_ratio", "min_ratio"):
        share = getattr(spec, name)
        if not 0.0 <= share <= 1.0:
            problems.append(f"{name} is {share:g}; it is a share from 0 to 1")
    total, warmup = spec.total_steps, spec.warmup_steps
    if total is not None and total < 1:
        problems.append(f"total_steps is {total}; the least allowed is 1")
    if total is None and spec.kind in KINDS[1:]:
        problems.append(f"a {spec.kind} schedule needs total_steps, which is not given")
    if warmup is None and total is None and spec.warmup_ratio:
        problems.append(f"warmup_ratio {spec.warmup_ratio:g} is a share of total_steps, which is not given")
    if warmup is not None and warmup < 0:
        problems.append(f"warmup_steps is {warmup}; the least allowed is 0")
    if problems:
        raise Violations(problems)
    if warmup is None:
        # The small term keeps products such as 0.29 * 100 = 28.999999999999996 from losing a step.
        warmup = math.floor(spec.warmup_ratio * (total or 0) + 1e-9)
    if total is not None and warmup >= total:
        message = (
            f"warmup takes {warmup} of {total} steps and leaves none after it; take fewer warmup steps or more in all"
        )
        raise ConfigError(message)
    return warmup
