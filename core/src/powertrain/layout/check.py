"""Reads a config string or its mapping form: each part by itself, then what the parts owe each other.

The words of a part get their meaning from its backend's spec, fault by fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import ConfigError, PluginError
from powertrain.layout.parts import PART_OPTIONS, Layout, Part, counted, in_attn
from powertrain.layout.text import DIM, NAME, OPTION, SECTION, Faults, mapping_text, read, shorten, value_text
from powertrain.options import OptionSpec, convert, names, nearest
from powertrain.specs import AxisSpec, BackendSpec

if TYPE_CHECKING:
    from powertrain.registry import Registry

MAX_CARDS: Final = 65_536
"""Most cards of one part, and so the largest size of an axis."""
_SEVERAL: Final = re.compile(r"[,;?]\s*[\w.-]+=")
_JOINED: Final = "; '&' joins options, as in '?a=1&b=2'"


def parse_layout(text: str | Mapping[str, Any], *, registry: Registry | None = None) -> Layout:
    """Return the layout that a config string, or its mapping form, means; see `powertrain.layout` for the grammar.

    Backends and transfers are looked up in `registry`, by default one of what is installed; only the plugins named
    are imported. Raises `LayoutError` with every fault, each with the line and a caret (of a mapping: the config
    string it stands for). Starts nothing.
    """
    if isinstance(text, Mapping):
        text = mapping_text(text)
    elif not isinstance(text, str):
        message = f"a layout (the key 'engines') is a config string or a mapping, not a {type(text).__name__}"
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
        differ = f"{leader.label!r} has {counted(leader.world)}, {part.label!r} has {part.world}"
        message = f"colocated parts have equal sizes: {differ}; make them equal, or separate them with '+'"
        faults.add(at, message, when=part.world != leader.world)
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


class Written:
    """One part as written; every fault that it has by itself goes to `faults`.

    found: the match of `PART`. name: None where none was given. role: "" for an unknown backend. part: what it means,
    None where faults leave no sizes.
    """

    def __init__(self, found: re.Match[str], first_card: int, registry: Registry, faults: Faults) -> None:
        self.found, self.fault = found, faults.add
        self.at = found.start("backend")
        self.backend: str = found["backend"]
        self.name = None if found["name"] is None else found["name"].strip()
        self._at: dict[str, int] = {}
        """Offsets of what a rule may point at: axes ("d"), sections ("ffn:") and values of options ("?lr")."""
        self._told_at = -1
        """Where an option ends that has no value: what stands there is no fault of its own."""
        self._spec: BackendSpec | None = None
        self._table: Mapping[str, AxisSpec] = {}
        try:
            spec = registry.backend(self.backend)
            self._spec, self._table = spec, spec.axis_table()
        except (PluginError, ConfigError) as exc:
            self.fault(self.at, str(exc))
        self.role = self._spec.role if self._spec else ""
        options = self._options()
        self._check_words(registry)
        before = len(faults)
        axes, expert_axes = self._sizes()
        self.part: Part | None = None
        if self._spec and len(faults) == before:
            self.part = Part(
                backend=self.backend,
                name=self.name or "",
                axes=axes,
                expert_axes=expert_axes,
                options=options,
                via=found["via"],
                first_card=first_card,
                spec=self._spec,
            )
            for broken, word, message in _rules(self.part):
                self.fault(self._at.get(word, found.start("sizes")), message, when=broken)

    def _check_words(self, registry: Registry) -> None:
        """Check the name and the transfer, and that nothing stands behind the part."""
        found, via = self.found, self.found["via"]
        self._stray(found, "rest", when=found.start("rest") != self._told_at)
        if found["name_end"] == "":
            self.fault(found.start("name") - 1, "bracket '[' is not closed")
        elif self.name is not None and not NAME.fullmatch(self.name):
            form = "it takes letters, digits, '_', '.', '-' and starts with a letter"
            self.fault(found.start("name"), f"{self.name!r} cannot be a name: {form}")
        if via is not None and via not in (known := registry.names("transfer")):
            what = f"unknown transfer {via!r}{nearest(via, known)}" if via else "a transfer is missing behind 'via'"
            self.fault(found.start("via"), f"{what}; there are: {', '.join(known) or 'none'}")

    def _stray(self, found: re.Match[str], piece: str, *, when: bool = True) -> None:
        text = found[piece].strip()
        first = text.partition(" ")[0]
        hint = nearest(first, ["via"]) if first != "via" else ""
        if ":" in text:
            hint = "; '|' joins parts on the same cards, '+' parts on cards of their own"
        elif piece == "rest" and "=" in text:
            hint = _JOINED
        self.fault(found.start(piece), f"unexpected {shorten(text, 20)!r}{hint}", when=when and text)

    def _sizes(self) -> tuple[dict[str, int], dict[str, int] | None]:
        """Return the sizes by axis, and with sections, those of `attn` and those of `ffn`."""
        written, opened = self.found["sections"], self.found.start("sizes")
        if written is None:
            return self._dims(self.found, ""), None
        self._stray(self.found, "stray")
        sizes: dict[str, dict[str, int]] = {}
        for section in SECTION.finditer(self.found.string, *self.found.span("sections")):
            name, at = section["section"], section.start("section")
            if name not in ("attn", "ffn"):
                self.fault(at, f"unknown section {name!r}{nearest(name, ('attn', 'ffn'))}; there are attn and ffn")
            elif name in sizes:
                self.fault(at, f"section {name!r} stands there twice")
            else:
                self._at[f"{name}:"] = at
                sizes[name] = self._dims(section, name)
        if not written.endswith(")"):
            self.fault(opened, "bracket '(' is not closed")
        elif "|" not in written:
            self.fault(opened, f"section {'attn' if 'ffn' in sizes else 'ffn'!r} is missing; write '(attn:…|ffn:…)'")
        return sizes.get("attn", {}), sizes.get("ffn", {})

    def _dims(self, found: re.Match[str], section: str) -> dict[str, int]:
        """Return the size of every axis of a section, 1 where not given; everything wrong with one axis is told here.

        Of an unknown backend any axis will do.
        """
        # An axis without its number is told below, and what stands in the number's place is no fault of its own.
        self._stray(found, "stray", when=found["dims"][-1:].isdecimal())
        allowed = {name: axis for name, axis in self._table.items() if _takes(section, axis)}
        start = found.start("dims")
        if not found["colon"] or not found["dims"]:
            example = f"{section or self.backend}:{next(iter(allowed), 'd')}1"
            self.fault(start, f"sizes are missing; write for example {example!r}")
            return {}
        sizes: dict[str, int] = {}
        for dim in DIM.finditer(found.string, *found.span("dims")):
            name, number = dim.groups()
            # More digits than any limit has say no more, and `int` refuses thousands of them.
            size = int(number.lstrip("0")[:9] or "0")
            known = allowed.get(name, AxisSpec(name))
            least, most = max(1, known.minimum), known.maximum or MAX_CARDS
            if name in sizes:
                self.fault(dim.start(), f"axis {name!r} stands there twice")
            elif self._spec and name not in allowed:
                self._unknown_axis(dim.start(), name, allowed, section)
            elif not number:
                self.fault(dim.end(), f"axis {name!r} has no number; write '{name}1'")
            elif not least <= size <= most:
                self.fault(dim.start(2), f"axis {name!r} has size {shorten(number, 9)}; it takes {least} to {most}")
            sizes[name] = size
            self._at[name] = dim.start()
        for name, known in allowed.items():
            if known.minimum > 1 and name not in sizes:
                self.fault(start, f"axis {name!r} is not given; it needs at least {known.minimum}")
        return {name: sizes.get(name, 1) for name in allowed}

    def _unknown_axis(self, at: int, name: str, allowed: Mapping[str, AxisSpec], section: str) -> None:
        if len(name) > 1 and set(name) <= set(allowed):
            self.fault(at + 1, f"axis {name[0]!r} has no number; write '{name[0]}1'")
            return
        where = f"section {section!r}" if section else f"backend {self.backend!r}"
        known = ", ".join(f"{axis.name} ({axis.title})" if axis.title else axis.name for axis in allowed.values())
        self.fault(at, f"{where} has no axis {name!r}{nearest(name.lower(), allowed)}; it has: {known or 'none'}")

    def _options(self) -> dict[str, Any]:
        """Return the given options, typed."""
        known = {option.name: option for option in (*(self._spec.options if self._spec else ()), *PART_OPTIONS)}
        values: dict[str, Any] = {}
        for option in OPTION.finditer(self.found.string, *self.found.span("options")):
            name, text = option["key"], option["value"]
            self._told_at = -1 if text else option.end()
            if not name:
                sign = option.group()[0]
                self.fault(option.start("key"), f"an option is missing behind {sign!r}; write '{sign}name=value'")
            elif f"?{name}" in self._at:
                self.fault(option.start("key"), f"option {name!r} stands there twice")
            elif self._spec and name not in known:
                listed = f"{nearest(name, known)}; it has: {names(known)}"
                self.fault(option.start("key"), f"backend {self.backend!r} has no option {name!r}{listed}")
            elif not text:
                self.fault(option.end(), f"option {name!r} has no value; write '{name}=value', an empty one as ''")
            elif text.count("'") % 2:
                self.fault(option.start("value"), "quote ' is not closed; a ' inside quotes is written ''")
            elif name in known:
                try:
                    values[name] = _value(known[name], text)
                except ConfigError as exc:
                    self.fault(option.start("value"), str(exc) + (_JOINED if _SEVERAL.search(text) else ""))
                except (ValueError, RecursionError):
                    self.fault(option.start("value"), f"option {name!r} takes finite numbers and no deep nesting")
            self._at[f"?{name}"] = option.start("value")
        return values


def _takes(section: str, axis: AxisSpec) -> bool:
    """True for an axis of that section; "" is a part without sections."""
    if section == "ffn":
        return axis.name in {"d", "t", "p", "e"} or axis.section == "ffn"
    return section == "" or in_attn(axis)


def _rules(part: Part) -> Iterator[tuple[object, str, str]]:
    """Yield (broken, word to point at, message) for every rule on the numbers that follow from a part's sizes."""
    label, world, base = repr(part.label), part.world, part.cards_per_instance
    p = part.axes.get("p", 1)
    yield world > MAX_CARDS, "", f"part {label} has {world} cards; the most allowed is {MAX_CARDS}"
    yield part.inline and world > 1, "?inline", f"inline engines have 1 rank; part {label} has {world}"
    yield part.inline and part.python, "?inline", f"part {label} is inline and has an interpreter of its own; drop one"
    if part.expert_axes is not None:
        ffn = part.expert_axes
        ranks, ffn_p, ffn_t, etp = math.prod(ffn.values()), ffn.get("p", 1), ffn.get("t", 1), part.options.get("etp", 1)
        needs = "they are for training backends with expert layers (axis 'e')"
        yield part.role != "train" or "e" not in ffn, "", f"backend {part.backend!r} has no sections; {needs}"
        yield p != ffn_p, "ffn:", f"attn has p{p} and ffn has p{ffn_p}; pipeline sizes are equal"
        yield world != ranks, "ffn:", f"attn has {world} ranks and ffn has {ranks}; on the same cards these are equal"
        yield etp not in (1, ffn_t), "?etp", f"option 'etp' is {etp} and ffn has t{ffn_t}; drop the option"
        return
    whose = f"world {base}" if part.instances == 1 else f"instance of {base} cards"
    e, etp, _ = part.expert or (1, 1, base)
    need = f"p*etp*e = {p}*{etp}*{e} = {p * etp * e} cards or a multiple"
    yield base % (p * etp * e), "e" if e > 1 else "?etp", f"expert layers need {need}; the {whose} is not"
    for name, axis in part.spec.axis_table().items():
        if name != "e" and not in_attn(axis):
            size = part.axes[name]
            yield base % size, name, f"axis {name!r} has size {size}, which does not divide the {whose}"


def _value(spec: OptionSpec, text: str) -> Any:
    """Convert an option's text; a quoted `'null'` is text. ValueError for what could not be printed again."""
    if text.startswith("'"):
        text = text[1:-1].replace("''", "'")
        spec = replace(spec, default="") if spec.type == "str" else spec
    value = convert(spec, text)
    value_text(value)
    return value
