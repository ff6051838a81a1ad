"""The recipe's own part of a checkpoint: little, since prompts' order and every seed follow from the step."""

from __future__ import annotations

import json
import zlib
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
    state = json.loads(json.dumps(state))  # as it will be read, keys being text then
    (folder / FILE).write_text(json.dumps({**state, "crc": _crc(state)}, indent=2) + "\n", encoding="utf-8")


def _crc(state: Mapping[str, Any]) -> int:
    """Return the CRC-32 of all but the CRC itself, however the file was laid out."""
    return zlib.crc32(json.dumps({k: v for k, v in state.items() if k != "crc"}, sort_keys=True).encode())


def read_state(folder: Path, *, step: int) -> dict[str, Any]:
    """Return what `save_state` wrote after `step`; CheckpointError when it is not there or not as it was written."""
    try:
        state: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        found, meant = _crc(state), state["crc"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        message = f"the checkpoint in {folder} is damaged: {FILE} cannot be read: {exc}"
        raise CheckpointError(message) from exc
    if found != meant:
        message = f"the checkpoint in {folder} is damaged: {FILE} has CRC-32 {found}, must have {meant}"
        raise CheckpointError(message)
    if state["step"] != step:
        message = f"the checkpoint in {folder} is that of step {state['step']}; its folder has been renamed"
        raise CheckpointError(message)
    return state


def check_state(folder: Path, state: Mapping[str, Any], *, options: Mapping[str, Any], seed: int) -> None:
    """Raise CheckpointError when a checkpoint's state belongs to a run with other data."""
    then = {**state["options"], "seed": state["seed"]}
    now = {**{name: options[name] for name in SHAPING}, "seed": seed}
    changed = [f"{name} was {then.get(name)!r} and is {now[name]!r}" for name in now if then.get(name) != now[name]]
    if changed:
        message = (
            f"checkpoint {folder} was made with other data: {'; '.join(changed)}; set them back, or begin a new run"
        )
        raise CheckpointError(message)
