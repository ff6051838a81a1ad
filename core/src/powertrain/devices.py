"""Which cards there are, and which of them each process may see.

The cards of a layout are slots 0, 1, 2, ...; a slot stands for an *entry* of the parent's visible-devices variable
(`4`, `GPU-aa`, a MIG name), never for an index counted from 0 again. On CPU the slots are only places and there may be
any number of them. Nothing here imports torch, since the driver has none.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from powertrain.errors import ConfigError, DeviceError
from powertrain.options import nearest

DEVICES: Final = ("auto", "cpu", "cuda")
VISIBLE_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_PROBE_SECONDS: Final = 20.0
_DRIVER_FOLDER: Final = Path("/proc/driver/nvidia/gpus")


def count_cards() -> int:
    """Return how many cards this host has, whatever the visible-devices variable says; 0 where no driver answers."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)
        return len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE))
    except (OSError, subprocess.SubprocessError):  # no tool, or one without its driver: the driver's own files decide
        return len(list(_DRIVER_FOLDER.glob("*")))


def visible_cards(variable_value: str | None, count: int | None = None) -> tuple[str, ...]:
    """Return the entries that children may be given, in order.

    variable_value: the parent's variable; None (unset) means all `count` cards, an empty text means none. As for the
    driver, the list ends at the first negative or empty entry. count: cards on this host (None: not known, then
    numbers are not checked against it). DeviceError for an entry given twice or a number that no card has.
    """
    if variable_value is None:
        return tuple(str(index) for index in range(count or 0))
    entries: list[str] = []
    for entry in (text.strip() for text in variable_value.split(",")):
        if not entry or entry.startswith("-") or entry == "NoDevFiles":
            break
        named = f"{VISIBLE_VARIABLE}={variable_value} names card {entry}"
        if entry in entries:
            message = f"{named} twice; two ranks would share it"
            raise DeviceError(message)
        if count and entry.isdecimal() and int(entry) >= count:
            message = f"{named}; this host has {count}, 0 to {count - 1}"
            raise DeviceError(message)
        entries.append(entry)
    return tuple(entries)


def require_cards(visible: Sequence[str], needed: int) -> None:
    """Raise DeviceError with both numbers when fewer cards are visible than a layout needs."""
    if len(visible) < needed:
        way = f"widen {VISIBLE_VARIABLE}, shrink the layout, or take device: cpu"
        message = f"{len(visible)} devices visible, {needed} needed; {way}"
        raise DeviceError(message)


def slot_entries(visible: Sequence[str], slots: Sequence[int]) -> str:
    """Return the variable's value for a process that holds these slots of the layout: the parent's own entries.

    Colocated parts hold the same slots and so get the same entries. DeviceError for a slot beyond the visible cards.
    """
    require_cards(visible, max(slots, default=-1) + 1)
    return ",".join(visible[slot] for slot in slots)


def device_variables(device: str, visible: Sequence[str], slots: Sequence[int]) -> dict[str, str]:
    """Return the `devices` layer of `powertrain.env.build_environment`: on cpu every card is hidden."""
    return {VISIBLE_VARIABLE: slot_entries(visible, slots) if device == "cuda" else ""}


def resolve_device(choice: str, environ: Mapping[str, str] | None = None) -> str:
    """Return `cpu` or `cuda` for `auto`, `cpu` or `cuda`; `auto` takes cuda when a card is visible.

    environ: None for this process's. DeviceError when cuda is asked for and no card is visible.
    """
    if choice not in DEVICES:
        message = f"device is {choice!r}; it takes {', '.join(DEVICES)}{nearest(choice, DEVICES)}"
        raise ConfigError(message)
    if choice == "cpu":
        return "cpu"
    variable = (os.environ if environ is None else environ).get(VISIBLE_VARIABLE)
    count = count_cards()
    if count and visible_cards(variable, count):
        return "cuda"
    if choice == "auto":
        return "cpu"
    hidden = "" if variable is None else f", {VISIBLE_VARIABLE} is {variable!r}"
    message = f"device is cuda and no card is visible ({count} on this host{hidden}); take cpu or auto"
    raise DeviceError(message)
