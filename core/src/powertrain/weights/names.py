"""Canonical HF names: what a tensor is called once the wrappers around its modules are taken away."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from powertrain.errors import Violations

WRAPPERS: Final = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "base_layer"})
"""Parts that FSDP1, activation checkpointing, torch.compile and PEFT put into a name; no model calls a module so."""


def canonical_name(name: str, *, adapter: str = "default") -> str | None:
    """Return the HF name of a tensor, or None for one that is not part of the served weights.

    Taken away: whole parts of `WRAPPERS` anywhere; `module.` and PEFT's `base_model.model.` at the root alone. Under
    PEFT, a fully trained module counts by its copy for `adapter`, not by the frozen original or another adapter's
    copy; LoRA pairs are not part of the full weights.
    """
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[:1] == ["module"] and len(parts) > 1:
        parts = parts[1:]
    if parts[:2] != ["base_model", "model"]:
        return ".".join(parts)
    parts = parts[2:]
    if "original_module" in parts or any(part.startswith("lora_") for part in parts):
        return None
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        if parts[at + 1 : at + 2] != [adapter]:
            return None
        parts = parts[:at] + parts[at + 2 :]
    return ".".join(parts)


def match_names(sent: Iterable[str], wanted: Iterable[str], *, adapter: str = "default") -> dict[str, str]:
    """Return sender's name -> receiver's name for all that is sent; names outside the served weights are left out.

    A receiver that keeps the model below a root of its own (`language_model.`) is found by the names themselves: the
    one root under which most of them exist. `Violations` names every sent name that matches none, in full, and every
    two that would be the same.
    """
    known = frozenset(wanted)
    names = {name: short for name in sent if (short := canonical_name(name, adapter=adapter)) is not None}
    shorts = set(names.values())
    roots: dict[str, int] = {"": len(shorts & known)}
    for receiver in known:
        parts = receiver.split(".")
        for at in range(1, len(parts)):
            if ".".join(parts[at:]) in shorts:
                root = ".".join(parts[:at]) + "."
                roots[root] = roots.get(root, 0) + 1
    root = min(roots, key=lambda r: (-roots[r], len(r), r))
    problems = [f"{name} matches no name of the receiver" for name, short in names.items() if root + short not in known]
    first: dict[str, str] = {}
    for name, short in names.items():
        other = first.setdefault(short, name)
        if other != name:
            problems.append(f"{other} and {name} would both become {root + short}")
    if problems:
        raise Violations(problems)
    return {name: root + short for name, short in names.items()}
