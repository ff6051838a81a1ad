"""`Layout`, `Part` and the numbers that follow from them: worlds, instances, cards, ranks, expert sizes.

This is the one place where such a number is worked out; launchers, engines, transfers and the command line read it
here. Both classes are made by `parse_layout` (or `Layout.from_mapping`), which has checked them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from powertrain.errors import ConfigError, DeviceError
from powertrain.layout.text import part_text
from powertrain.options import OptionSpec, nearest
from powertrain.specs import AxisSpec, BackendSpec

if TYPE_CHECKING:
    from powertrain.registry import Registry

PART_OPTIONS: Final = (
    OptionSpec(name="python", help="interpreter that runs this part's workers; the driver's own if not given"),
    OptionSpec(name="frozen", type="bool", default=False, help="this part gets no weight updates (judge, reference)"),
    OptionSpec(name="inline", type="bool", help="live in the driver's process (one rank only); chosen if not given"),
    OptionSpec(name="head_fp32", type="bool", help="the LM head's precision in this part alone; see head_mismatch"),
)
"""Options that every backend's parts take, beside the backend's own."""
_ORDER: Final = ("d", "t", "p", "c", "e")


class Place(NamedTuple):
    """Where one rank of a part lives.

    card: absolute 0-based slot in the layout. instance: which engine of the part. rank_in_instance: its rank in that
    engine's own world. coordinates: index along every axis that multiplies the world.
    """

    card: int
    instance: int
    rank_in_instance: int
    coordinates: Mapping[str, int]


class Expert(NamedTuple):
    """Sizes of the expert layers in one engine: `ep` expert parallel, `etp` tensor parallel, `dp` data parallel."""

    ep: int
    etp: int
    dp: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """One engine (or set of equal instances) of a layout.

    name: "" where none was given. axes: size of every axis of the backend, 1 where not given; with sections, those of
    `attn`. expert_axes: sizes of section `ffn`, or None without sections. options: the given ones, typed.
    via: transfer named behind this part, or None. first_card: its first slot. spec: the backend's spec.
    """

    backend: str
    name: str = ""
    axes: Mapping[str, int] = field(hash=False)
    expert_axes: Mapping[str, int] | None = field(default=None, hash=False)
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    via: str | None = None
    first_card: int = 0
    spec: BackendSpec = field(compare=False, repr=False)

    @property
    def role(self) -> str:
        """`train` or `infer`."""
        return self.spec.role

    @property
    def label(self) -> str:
        """The part's name, or its backend where it has none; unique in a layout."""
        return self.name or self.backend

    @property
    def world(self) -> int:
        """Number of ranks, which is the number of cards: the product of all axes that multiply the world."""
        return math.prod(self.axes[axis.name] for axis in self._rank_axes())

    @property
    def instances(self) -> int:
        """Number of separate engines: the size of the instance axis (`d` of an infer backend), 1 for training."""
        return math.prod(self.axes[axis.name] for axis in self._rank_axes() if axis.instances)

    @property
    def cards_per_instance(self) -> int:
        """Cards of one instance."""
        return self.world // self.instances

    @property
    def cards(self) -> range:
        """The part's absolute 0-based slots; colocated parts have the same."""
        return range(self.first_card, self.first_card + self.world)

    @property
    def expert(self) -> Expert | None:
        """Sizes of the expert layers, or None where nothing was said of them.

        Without sections `etp` is the option of that name or 1, never the dense tensor size, and
        dp = cards_per_instance / (p * etp * ep). With sections all three are those of `ffn`.
        """
        if (sizes := self.expert_axes) is not None:
            return Expert(sizes.get("e", 1), sizes.get("t", 1), sizes.get("d", 1))
        ep, etp = self.axes.get("e", 1), cast("int | None", self.options.get("etp")) or 1
        if ep == 1 and etp == 1:
            return None
        return Expert(ep, etp, self.cards_per_instance // (self.axes.get("p", 1) * etp * ep))

    @property
    def frozen(self) -> bool:
        """True if the part never gets a weight update."""
        return bool(self.options.get("frozen", False))

    @property
    def python(self) -> str | None:
        """Interpreter of the part's workers, or None for the driver's own."""
        return cast("str | None", self.options.get("python"))

    @property
    def inline(self) -> bool | None:
        """True: in the driver's process; False: in a worker; None: not said."""
        return cast("bool | None", self.options.get("inline"))

    @property
    def engine_options(self) -> dict[str, Any]:
        """The given options that are the backend's own."""
        core = {option.name for option in PART_OPTIONS}
        return {name: value for name, value in self.options.items() if name not in core}

    def place(self, rank: int) -> Place:
        """Return where `rank` (0-based, of this part) lives.

        Ranks are numbered by the spec's axis order, slowest first, instance axes before all others: rank j of an
        infer part belongs to instance j // cards_per_instance. ConfigError for a rank outside the part.
        """
        if not 0 <= rank < self.world:
            message = f"part {self.label!r} has ranks 0 to {self.world - 1}, not {rank}"
            raise ConfigError(message)
        coordinates: dict[str, int] = {}
        rest = rank
        for axis in reversed(self._rank_axes()):
            rest, coordinates[axis.name] = divmod(rest, self.axes[axis.name])
        instance, inner = divmod(rank, self.cards_per_instance)
        return Place(self.first_card + rank, instance, inner, dict(reversed(coordinates.items())))

    def _rank_axes(self) -> list[AxisSpec]:
        return sorted(filter(in_attn, self.spec.axis_table().values()), key=lambda axis: not axis.instances)

    def to_mapping(self) -> dict[str, Any]:
        """Return the part as a plain mapping; keys that say nothing are left out, options are sorted by name."""
        found = {
            "backend": self.backend,
            "name": self.name,
            "axes": _shown(self.axes),
            "expert_axes": _shown(self.expert_axes or {}),
            "options": dict(sorted(self.options.items())),
            "via": self.via,
        }
        return {key: value for key, value in found.items() if value not in ("", None, {})}

    def __str__(self) -> str:
        return part_text(self.to_mapping())


class Pair(NamedTuple):
    """A training part and an inference part that takes its weights; via: the transfer named for them, or None."""

    train: Part
    infer: Part
    via: str | None
    colocated: bool


@dataclass(frozen=True)
class Layout:
    """What a config string means. groups: separate ones (`+`), each a tuple of colocated parts (`|`).

    `str(layout)` is the canonical text; parsing it gives an equal layout.
    """

    groups: tuple[tuple[Part, ...], ...]

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts in the order written."""
        return tuple(part for group in self.groups for part in group)

    @property
    def cards(self) -> int:
        """Slots needed: every group's cards, colocated parts counted once."""
        return sum(group[0].world for group in self.groups)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Every training part whose weights inference parts take, with each of those; see the package's docstring."""
        trained = [part for part in self.role("train") if not part.frozen]
        actors = [part for part in trained if part.name == "actor"]
        return tuple(
            Pair(train, infer, infer.via or train.via, train.first_card == infer.first_card)
            for train in actors or trained
            for infer in self.role("infer")
            if not infer.frozen
        )

    def role(self, role: str) -> tuple[Part, ...]:
        """Return the parts of `train` or `infer`."""
        return tuple(part for part in self.parts if part.role == role)

    def part(self, label: str) -> Part:
        """Return the part with that name, or that backend where it has no name; ConfigError lists what there is."""
        table = {part.label: part for part in self.parts}
        if label not in table:
            message = f"the layout has no part {label!r}{nearest(label, table)}; it has: {', '.join(table)}"
            raise ConfigError(message)
        return table[label]

    def check_cluster(self, *, cards: int, nodes: int = 1) -> None:
        """Raise `DeviceError` unless `nodes` nodes of `cards` cards each hold the layout."""
        if cards < 1 or nodes < 1:
            message = f"a cluster of {nodes} nodes with {cards} cards each holds nothing; both must be at least 1"
            raise ConfigError(message)
        if self.cards > cards * nodes:
            sizes = " + ".join(str(group[0].world) for group in self.groups)
            groups = f" ({sizes})" if len(self.groups) > 1 else ""
            need = f"needs {counted(self.cards)}{groups}, the cluster has {cards * nodes} ({nodes} x {cards})"
            message = f"layout {str(self)!r} {need}; make a part smaller, or colocate parts with '|'"
            raise DeviceError(message)

    def to_mapping(self) -> dict[str, Any]:
        """Return the canonical plain mapping: `{"groups": [[part, ...], ...]}`."""
        return {"groups": [[part.to_mapping() for part in group] for group in self.groups]}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, registry: Registry | None = None) -> Layout:
        """Return the layout of a mapping made by `to_mapping` or written by hand; `LayoutError` as `parse_layout`."""
        from powertrain.layout.check import parse_layout

        return parse_layout(mapping, registry=registry)

    def __str__(self) -> str:
        return "+".join("|".join(map(str, group)) for group in self.groups)


def counted(cards: int) -> str:
    """Return a number of cards in words, `1 card` or `2 cards`."""
    return f"{cards} card{'s' * (cards != 1)}"


def in_attn(axis: AxisSpec) -> bool:
    """True for an axis that multiplies the world of a part; the others lie within those."""
    return axis.world and axis.section != "ffn"


def _shown(axes: Mapping[str, int]) -> dict[str, int]:
    """Return the axes that are written: the first one always, the others where they are not 1; `d t p c e` first."""
    names = sorted(axes, key=lambda name: _ORDER.index(name) if name in _ORDER else len(_ORDER))
    return {name: axes[name] for i, name in enumerate(names) if i == 0 or axes[name] != 1}
