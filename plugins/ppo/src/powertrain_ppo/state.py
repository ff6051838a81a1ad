"""The recipe's own part of a checkpoint: little, since prompts' order and every seed follow from the step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from powertrain.errors import CheckpointError

FILE: Final = "recipe.json"
SHAPING: Final = ("prompts_per_step", "group_size", "data", "data_options", "held_out")
"""Options that decide which prompts a step trains on; a resumed run must have those of the checkpoint."""


def save_state(folder: Path, *, step: int, options: Mapping[str, Any], seed: int) -> None:
    """Write the state after `step` into a checkpoint folder."""
    kept = {name: options[name] for name in SHAPING}
    state = {"step": step, "prompts": step * options["prompts_per_step"], "seed": seed, "options": kept}
    (folder / FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def load_state(folder: Path, *, options: Mapping[str, Any], seed: int) -> int:
    """Return the step of a checkpoint; CheckpointError when it belongs to a run with other data."""
    try:
        state = json.loads((folder / FILE).read_text(encoding="utf-8"))
        step, then = int(state["step"]), {**state["options"], "seed": state["seed"]}
    except (OSError, ValueError, KeyError, TypeError) as exc:
        message = f"checkpoint {folder} has no usable {FILE}: {exc}"
        raise CheckpointError(message) from exc
    now = {**{name: options[name] for name in SHAPING}, "seed": seed}
    changed = [f"{name} was {then.get(name)!r} and is {now[name]!r}" for name in now if then.get(name) != now[name]]
    if changed:
        message = (
            f"checkpoint {folder} was made with other data: {'; '.join(changed)}; set them back, or begin a new run"
        )
        raise CheckpointError(message)
    return step
