"""Reads a config string or its mapping form: each part by itself, then what the parts owe each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.layout.faults import Faults
from powertrain.layout.mapping import mapping_text
from powertrain.layout.parts import Layout
from powertrain.layout.text import read
from powertrain.layout.written import Written

if TYPE_CHECKING:
    from powertrain.registry import Registry


def parse_layout(text: str | Mapping[str, Any], *, registry: Registry | None = None) -> Layout:
    """Return the layout that a config string, or its mapping form, means; see `powertrain.layout` for the grammar.

    Backends and transfers are looked up in `registry`, by default one of what is installed; only the plugins named
    are imported. Raises `LayoutError` with every fault, each with the line and a caret (of a mapping: the config
    string it stands for). Starts nothing.
    """
    if isinstance(text, Mapping):
        text = mapping_text(text)
    elif not isinstance(text, str):
        message = f"a layout is a config string or a mapping, not {type(text).__name__}"
        raise ConfigError(message)
    if registry is None:
        from powertrain.registry import Registry

        registry = Registry()
    faults = Faults(text)
    groups: list[list[Written]] = []
    first_card = 0
    for matches in read(text, faults):
        group = [Written(found, first_card, registry, faults) for found in matches]
        first_card += _check_equal_sizes(group, faults)
        groups.append(group)
    parts = [written for group in groups for written in group]
    layout = Layout(tuple(tuple(written.part for written in group if written.part) for group in groups))
    _check_names(parts, faults)
    _check_transfers(parts, layout, faults)
    faults.check()
    return layout


def _check_equal_sizes(group: list[Written], faults: Faults) -> int:
    """Check that colocated parts have equal worlds; return the group's number of cards."""
    sizes = [(written.at, written.part) for written in group if written.part]
    for at, part in sizes:
        leader = sizes[0][1]
        sizes_differ = f"{leader.label!r} has {leader.world} cards, {part.label!r} has {part.world}"
        if part.world != leader.world:
            faults.add(
                at, f"colocated parts have equal sizes: {sizes_differ}; make them equal, or separate them with '+'"
            )
    return sizes[0][1].world if sizes else 0


def _check_names(parts: list[Written], faults: Faults) -> None:
    """Check that several parts of one role have names, and that no two parts have the same."""
    roles = [written.role for written in parts]
    taken = {written.backend for written in parts if written.name is None}
    for written in parts:
        if written.name in taken:
            faults.add(written.found.start("name"), f"two parts have the name {written.name!r}; names are unique")
        elif written.name is not None:
            taken.add(written.name)
        elif written.role and (count := roles.count(written.role)) > 1:
            example = f"'{written.backend}[{'actor' if written.role == 'train' else 'rollout'}]:…'"
            faults.add(written.at, f"{count} parts have the role {written.role}, so each needs a name: {example}")


def _check_transfers(parts: list[Written], layout: Layout, faults: Faults) -> None:
    """Check that each transfer stands behind a part of a pair, and agrees with the one behind the pair's other part."""
    for written in parts:
        part, at = written.part, written.found.start("via")
        if part is None or not part.via:
            continue
        pairs = [pair for pair in layout.pairs if part in (pair.train, pair.infer)]
        reason = "is frozen and gets no weights" if part.frozen else "has no partner to exchange weights with"
        alone = not pairs and (part.frozen or all(other.part for other in parts))
        faults.add(at, f"part {part.label!r} {reason}; drop the transfer", when=alone)
        for pair in pairs:
            if part == pair.infer and pair.train.via not in (None, part.via):
                both = f"{pair.train.label!r}, {part.label!r} has two transfers, {pair.train.via} and {part.via}"
                faults.add(at, f"the pair {both}; name it once, behind the part that takes the weights")
