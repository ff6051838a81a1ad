"""Gives a config string its meaning: backends' specs, sizes, options, names and transfers, all faults at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import ConfigError, PluginError, UnknownPluginError
from powertrain.layout.mapping import mapping_text
from powertrain.layout.parts import PART_OPTIONS, Layout, Part, in_attn
from powertrain.layout.text import Problems, RawOption, RawPart, Word, read
from powertrain.options import OptionSpec, convert, nearest
from powertrain.specs import AxisSpec, BackendSpec

if TYPE_CHECKING:
    from powertrain.registry import Registry

MAX_CARDS: Final = 65_536
"""Most cards of one part, and so the largest size of an axis."""
DESIGNED_TRANSFERS: Final = ("local", "shm", "ipc", "p2p", "disk", "awex")
"""Transfers of the vocabulary: `via` takes them also where no installed plugin brings them yet."""
_FFN: Final = ("d", "t", "p", "e")


def parse_layout(
    text: str | Mapping[str, Any],
    *,
    registry: Registry | None = None,
    specs: Mapping[str, BackendSpec] | None = None,
) -> Layout:
    """Return the layout that a config string, or its mapping form, means; see `powertrain.layout` for the grammar.

    Backends are looked up in `specs` where given, else in `registry`, else in a registry of what is installed; only
    the plugins named are imported. Raises `LayoutError` with every fault, each with the line and a caret (of a mapping:
    the config string it stands for). Starts nothing.
    """
    if isinstance(text, Mapping):
        text = mapping_text(text)
    elif not isinstance(text, str):
        message = f"a layout is a config string or a mapping, not {type(text).__name__}"
        raise ConfigError(message)
    problems = Problems(text)
    raw = read(text, problems)
    lookup, transfers = _sources(registry, specs)
    checker = _Checker(problems, lookup)
    groups: list[list[Part | None]] = []
    first = 0
    for group in raw:
        groups.append([checker.part(part, first) for part in group])
        first += checker.same_size(group, groups[-1])
    pairs = [pair for group, made in zip(raw, groups, strict=True) for pair in zip(group, made, strict=True)]
    checker.names(pairs)
    checker.vias(pairs, Layout(tuple(tuple(p for p in group if p) for group in groups)), transfers)
    problems.check()
    return Layout(tuple(tuple(part for part in group if part) for group in groups))


def _sources(
    registry: Registry | None, specs: Mapping[str, BackendSpec] | None
) -> tuple[Callable[[str], BackendSpec], Callable[[], list[str]]]:
    """Return how to look up a backend, and how to list the known transfers."""
    if specs is not None and registry is None:
        table = dict(specs)

        def find(name: str) -> BackendSpec:
            if name in table:
                return table[name]
            known = ", ".join(sorted(table)) or "none"
            message = f"unknown backend {name!r}{nearest(name, table)}; there are: {known}"
            raise UnknownPluginError(message, plugin=name, group="powertrain.backends")

        return find, lambda: list(DESIGNED_TRANSFERS)
    if registry is None:
        from powertrain.registry import Registry

        registry = Registry()
    found = registry
    return found.backend, lambda: list(dict.fromkeys((*DESIGNED_TRANSFERS, *found.names("transfer"))))


@dataclass
class _Checker:
    problems: Problems
    lookup: Callable[[str], BackendSpec]

    def part(self, raw: RawPart, first: int) -> Part | None:
        """Return the part that `raw` means, or None where its faults leave no sizes to go on with."""
        spec, table = self._spec(raw.backend)
        before = len(self.problems)
        if raw.missing is not None:
            axis = "d" if not table or "d" in table else next(iter(table))
            self.problems.add(raw.missing, f"sizes are missing; write for example '{raw.backend.text}:{axis}1'")
        hybrid = "" not in raw.sections and bool(raw.sections)
        dense = self._sizes(raw.sections.get("attn" if hybrid else "", []), spec, table, "attn" if hybrid else "")
        ffn = self._sizes(raw.sections.get("ffn", []), spec, table, "ffn") if hybrid else None
        if hybrid and spec and table is not None and ("e" not in table or spec.role != "train"):
            message = (
                f"backend {spec.name!r} has no sections; they are for training backends with expert layers (axis 'e')"
            )
            self.problems.add(min(raw.sections_at.values()), message)
        sound = len(self.problems) == before and not raw.broken
        options = self._options(raw.options, spec)
        if spec is None or table is None or not sound:
            return None
        axes = {name: dense.get(name, 1) for name, axis in table.items() if not hybrid or in_attn(axis)}
        experts = {name: ffn.get(name, 1) for name, axis in table.items() if _in_ffn(axis)} if ffn is not None else None
        part = Part(
            backend=raw.backend.text,
            name=raw.name.text if raw.name else "",
            axes=axes,
            expert_axes=experts,
            options=options,
            via=raw.via.text if raw.via else None,
            first_card=first,
            spec=spec,
        )
        self._fits(raw, part, table)
        return part

    def _spec(self, word: Word) -> tuple[BackendSpec | None, dict[str, AxisSpec] | None]:
        if not word.text:
            return None, None
        try:
            spec = self.lookup(word.text)
            return spec, spec.axis_table()
        except (PluginError, ConfigError) as exc:
            self.problems.add(word.at, str(exc))
            return None, None

    def _sizes(
        self, dims: list[tuple[Word, Word]], spec: BackendSpec | None, table: dict[str, AxisSpec] | None, section: str
    ) -> dict[str, int]:
        """Return the sizes by axis; everything wrong with a single axis is told here."""
        sizes: dict[str, int] = {}
        allowed = None if table is None else {name: axis for name, axis in table.items() if _allowed(axis, section)}
        for axis, number in dims:
            if axis.text in sizes:
                self.problems.add(axis.at, f"axis {axis.text!r} stands there twice")
                continue
            known = allowed.get(axis.text) if allowed is not None else None
            if allowed is not None and spec is not None and known is None:
                self._unknown_axis(axis, spec.name, table or {}, allowed, section)
            elif not number.text:
                self.problems.add(number.at, f"axis {axis.text!r} has no number; write '{axis.text}1'")
            if not number.text:
                continue
            least, most = (known.minimum, known.maximum or MAX_CARDS) if known else (1, MAX_CARDS)
            digits = number.text.lstrip("0") or "0"
            size = int(digits) if len(digits) < 9 else 10**9
            shown = digits if len(digits) < 13 else digits[:9] + "…"
            if not max(1, least) <= size <= most:
                reach = (
                    f"the least allowed is {max(1, least)}"
                    if size < least or not size
                    else f"the most allowed is {most}"
                )
                self.problems.add(number.at, f"axis {axis.text!r} has size {shown}; {reach}")
            sizes[axis.text] = size
        if dims and section != "ffn":
            for name, known in (allowed or {}).items():
                if name not in sizes and known.minimum > 1:
                    self.problems.add(dims[0][0].at, f"axis {name!r} is not given; it needs at least {known.minimum}")
        return sizes

    def _size(self, axis: str, number: Word, least: int, most: int) -> int:
        digits = number.text.lstrip("0") or "0"
        size = int(digits) if len(digits) < 9 else 10**9
        shown = digits if len(digits) < 13 else digits[:9] + "…"
        if size < least:
            self.problems.add(number.at, f"axis {axis!r} has size {shown}; the least allowed is {least}")
        elif size > most:
            self.problems.add(number.at, f"axis {axis!r} has size {shown}; the most allowed is {most}")
        return size

    def _unknown_axis(
        self, axis: Word, backend: str, table: Mapping[str, AxisSpec], allowed: Mapping[str, AxisSpec], section: str
    ) -> None:
        name = axis.text
        if name in table:
            where = "belongs to the expert layers" if section != "ffn" else "does not exist in expert layers"
            self.problems.add(axis.at, f"axis {name!r} {where}; {section or 'here'} takes: {', '.join(allowed)}")
        elif len(name) > 1 and all(letter in table for letter in name):
            self.problems.add(axis.at + 1, f"axis {name[0]!r} has no number; write '{name[0]}1'")
        else:
            listed = ", ".join(f"{key} ({known.title})" if known.title else key for key, known in allowed.items())
            hint = nearest(name, allowed) or nearest(name.lower(), allowed)
            self.problems.add(axis.at, f"backend {backend!r} has no axis {name!r}{hint}; it has: {listed or 'none'}")

    def _options(self, options: list[RawOption], spec: BackendSpec | None) -> dict[str, Any]:
        known = {option.name: option for option in (*(spec.options if spec else ()), *PART_OPTIONS)}
        values: dict[str, Any] = {}
        seen: set[str] = set()
        for option in options:
            name = option.key.text
            if name in seen:
                self.problems.add(option.key.at, f"option {name!r} stands there twice")
            elif name in known:
                try:
                    values[name] = _value(known[name], option)
                except ConfigError as exc:
                    self.problems.add(option.value.at, str(exc))
            elif spec is not None:
                listed = ", ".join(sorted(known))
                message = f"backend {spec.name!r} has no option {name!r}{nearest(name, known)}; it has: {listed}"
                self.problems.add(option.key.at, message)
            seen.add(name)
        return values

    def _fits(self, raw: RawPart, part: Part, table: Mapping[str, AxisSpec]) -> None:
        """Check the numbers that follow from the sizes: world, expert layers, axes that lie within others."""
        dims = {axis.text: axis.at for pairs in raw.sections.values() for axis, _ in pairs}
        start = min(raw.sections_at.values())
        options = {option.key.text: option.value.at for option in raw.options}
        if part.world > MAX_CARDS:
            self.problems.add(start, f"part {part.label!r} has {part.world} cards; the most allowed is {MAX_CARDS}")
        if part.inline and part.world > 1:
            message = f"inline engines have 1 rank; part {part.label!r} has {part.world}"
            self.problems.add(options["inline"], message)
        if part.inline and part.python:
            message = f"part {part.label!r} cannot be inline and have an interpreter of its own; drop one of the two"
            self.problems.add(options["inline"], message)
        if part.expert_axes is not None:
            self._sections_agree(raw, part)
            return
        base = part.cards_per_instance
        whose = f"world {part.world}" if part.instances == 1 else f"instance of {base} cards"
        p, etp, e = part.axes.get("p", 1), part.etp, part.axes.get("e", 1)
        if (e > 1 or etp > 1) and base % (p * etp * e):
            at = dims["e"] if e > 1 else options["etp"]
            message = (
                f"expert layers need p*etp*e = {p}*{etp}*{e} = {p * etp * e} cards or a multiple; the {whose} is not"
            )
            self.problems.add(at, message)
        for name, axis in table.items():
            if not in_attn(axis) and name != "e" and base % part.axes[name]:
                message = f"axis {name!r} has size {part.axes[name]}, which does not divide the {whose}"
                self.problems.add(dims[name], message)

    def _sections_agree(self, raw: RawPart, part: Part) -> None:
        sizes = part.expert_axes or {}
        ffn = 1
        for size in sizes.values():
            ffn *= size
        at = raw.sections_at["ffn"]
        if part.axes.get("p", 1) != sizes.get("p", 1):
            message = f"attn has p{part.axes.get('p', 1)} and ffn has p{sizes.get('p', 1)}; pipeline sizes are equal"
            self.problems.add(at, message)
        if part.world != ffn:
            message = f"attn has {part.world} ranks and ffn has {ffn}; both lie on the same cards, so these are equal"
            self.problems.add(at, message)
        for option in raw.options:
            given = part.options.get("etp")
            if option.key.text == "etp" and given is not None and given != sizes.get("t", 1):
                message = f"option 'etp' is {given} and ffn has t{sizes.get('t', 1)}; drop the option"
                self.problems.add(option.value.at, message)

    def same_size(self, raw: list[RawPart], made: list[Part | None]) -> int:
        """Check that colocated parts have equal worlds; return the group's number of cards."""
        known = [(there, part) for there, part in zip(raw, made, strict=True) if part]
        for there, part in known[1:]:
            leader = known[0][1]
            if part.world != leader.world:
                message = (
                    f"colocated parts have equal sizes: {leader.label!r} has {leader.world} cards, {part.label!r} has "
                    f"{part.world}; make them equal, or separate them with '+'"
                )
                self.problems.add(there.at, message)
        return known[0][1].world if known else 0

    def names(self, pairs: Iterable[tuple[RawPart, Part | None]]) -> None:
        """Check that several parts of one role have names, and that no two parts have the same."""
        pairs = list(pairs)
        roles: dict[str, list[RawPart]] = {}
        taken = {raw.backend.text for raw, _ in pairs if raw.name is None}
        for raw, part in pairs:
            spec = part.spec if part else self._spec(raw.backend)[0]
            if spec:
                roles.setdefault(spec.role, []).append(raw)
            if raw.name and raw.name.text in taken:
                self.problems.add(raw.name.at, f"two parts have the name {raw.name.text!r}; names are unique")
            taken |= {raw.name.text} if raw.name else set()
        for role, raws in roles.items():
            example = "actor" if role == "train" else "rollout"
            for raw in raws:
                if len(raws) > 1 and raw.name is None:
                    written = f"'{raw.backend.text}[{example}]:…'"
                    message = f"{len(raws)} parts have the role {role}, so each needs a name: {written}"
                    self.problems.add(raw.at, message)

    def vias(
        self,
        pairs: Iterable[tuple[RawPart, Part | None]],
        layout: Layout,
        transfers: Callable[[], list[str]],
    ) -> None:
        """Check that each `via` names a transfer, stands in a pair, and agrees with the pair's other part."""
        places = {id(part): raw.via for raw, part in pairs if raw.via and part}
        words = [raw.via for raw, _ in pairs if raw.via]
        known = transfers() if words else []
        for word in words:
            if word.text not in known:
                message = f"unknown transfer {word.text!r}{nearest(word.text, known)}; there are: {', '.join(known)}"
                self.problems.add(word.at, message)
        complete = all(part for _, part in pairs)
        for raw, part in pairs:
            if part is None or raw.via is None:
                continue
            if part.frozen:
                self.problems.add(raw.via.at, f"part {part.label!r} is frozen and gets no weights; drop the transfer")
            elif complete and not any(part is pair.train or part is pair.infer for pair in layout.pairs):
                self.problems.add(
                    raw.via.at, f"part {part.label!r} has no partner to exchange weights with; drop the transfer"
                )
        for pair in layout.pairs:
            if pair.train.via and pair.infer.via and pair.train.via != pair.infer.via:
                message = (
                    f"the pair {pair.train.label!r}, {pair.infer.label!r} has two transfers, {pair.train.via} and "
                    f"{pair.infer.via}; name it once, behind the part that takes the weights"
                )
                later = max(places[id(pair.train)].at, places[id(pair.infer)].at)
                self.problems.add(later, message)


def _in_ffn(axis: AxisSpec) -> bool:
    return axis.name in _FFN or axis.section == "ffn"


def _allowed(axis: AxisSpec, section: str) -> bool:
    return {"attn": in_attn, "ffn": _in_ffn}[section](axis) if section else True


def _value(spec: OptionSpec, option: RawOption) -> Any:
    """Convert an option's text; a quoted `'null'` is text, and what could not be printed again is refused."""
    if option.quoted and spec.type == "str":
        spec = replace(spec, default="")
    try:
        value = convert(spec, option.value.text)
        json.dumps(value, allow_nan=False)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as exc:
        message = f"option {spec.name!r} takes finite numbers and values nested a few levels deep"
        raise ConfigError(message) from exc
    return value
