"""Canonical HF names: what a tensor is called once the wrappers around its modules are taken away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

WRAPPERS: Final = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "base_layer"})
"""Parts that FSDP1, activation checkpointing, torch.compile and PEFT put into a name; no model calls a module so."""


class Match(NamedTuple):
    """What became of every sent name: names (sender's -> receiver's), unmatched, or left_out of the served weights.

    clashes: two sent names that would both become one of the receiver's.
    """

    names: dict[str, str]
    unmatched: tuple[str, ...]
    left_out: tuple[str, ...]
    clashes: tuple[tuple[str, str, str], ...]


def canonical_name(name: str, *, adapter: str = "default") -> str | None:
    """Return the HF name of a tensor, or None for one that is not part of the served weights.

    Taken away: whole parts of `WRAPPERS` anywhere; `module.` and PEFT's `base_model.model.` at the root alone. Under
    PEFT, a fully trained module counts by its copy for `adapter`, not by the frozen original or another adapter's
    copy. LoRA pairs keep their names, which no full receiver has: they are merged, or sent as an adapter.
    """
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    while parts[0] == "module" and len(parts) > 1:
        parts = parts[1:]
    if parts[:2] != ["base_model", "model"]:
        return ".".join(parts)
    parts = parts[2:]
    if "original_module" in parts:
        return None
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        if parts[at + 1 : at + 2] != [adapter]:
            return None
        parts = parts[:at] + parts[at + 2 :]
    return ".".join(parts)


def match_names(sent: Iterable[str], wanted: Collection[str], *, adapter: str = "default") -> Match:
    """Match the sender's names to the receiver's; every sent name is matched, unmatched or left out.

    A name that the receiver has is taken as it is. A receiver that keeps the model below a root of its own
    (`language_model.`) is found by the names themselves: the one root under which most of them exist.
    """
    known = frozenset(wanted)
    shorts = {name: name if name in known else canonical_name(name, adapter=adapter) for name in sent}
    root = _root({short for short in shorts.values() if short is not None}, known)
    names: dict[str, str] = {}
    first: dict[str, str] = {}
    clashes = []
    for name, short in shorts.items():
        found = [] if short is None else [full for full in (root + short, short) if full in known]
        if found:
            names[name] = found[0]
            if first.setdefault(found[0], name) != name:
                clashes.append((first[found[0]], name, found[0]))
    unmatched = tuple(name for name, short in shorts.items() if short is not None and name not in names)
    return Match(names, unmatched, tuple(n for n, short in shorts.items() if short is None), tuple(clashes))


def _root(shorts: Collection[str], known: Collection[str]) -> str:
    """Return the prefix of the receiver under which most names exist; the shortest of several."""
    roots = Counter({"": sum(short in known for short in shorts)})
    if roots[""] < len(shorts):
        for receiver in known:
            parts = receiver.split(".")
            cuts = range(1, len(parts))
            roots.update(".".join(parts[:at]) + "." for at in cuts if ".".join(parts[at:]) in shorts)
    return min(roots, key=lambda root: (-roots[root], len(root), root))
