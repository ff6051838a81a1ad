"""`powertrain explain 'STRING'`: what a config string means, before anything starts.

`--json` prints one object: `schema` (1; grows when a key changes its meaning), `layout` (canonical text), `mapping`
(the same as a plain mapping), `cards` (slots needed), `groups` (`cards` as [first, last], `parts` as labels),
`parts` and `pairs` (`train`, `infer`, `via`, `colocated`). A part has `label`, `backend`, `name`, `role`, `status`,
`summary`, `axes` and `expert_axes` (name -> `size`, `title`), `expert` (`ep`, `etp`, `dp`, or null), `world`,
`instances`, `cards_per_instance`, `cards` as [first, last], `colocated_with`, `frozen`, `via`, `options` (name ->
`value`, `default`: whether it was not given; of those that lists leave out, what is given) and `ranks`, one `[rank,
card, instance, rank_in_instance, coordinates]` for each rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from powertrain.layout import PART_OPTIONS, Layout, Part, parse_layout
from powertrain.layout.parts import counted

_LISTED: Final = 16
"""Parts of at most so many ranks are listed rank by rank, others by instance."""
_EXPERT: Final = {"ep": "expert parallel", "etp": "tensor parallel of one expert", "dp": "copies of the experts"}
_Rows = Iterator[tuple[str, ...]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `powertrain explain`."""
    parser.add_argument("layout", help="config string, for example 'BACKEND:d2t2+BACKEND:d4'")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--cards", type=int, help="cards of each node; the layout must fit")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (default 1)")


def execute(args: argparse.Namespace) -> int:
    """Explain `args.layout` on standard output and return 0; `LayoutError` or `DeviceError` where it does not fit."""
    layout = parse_layout(args.layout)
    if args.cards is not None:
        layout.check_cluster(cards=args.cards, nodes=args.nodes)
    if args.json:
        sys.stdout.write(json.dumps(describe(layout), indent=2) + "\n")
    else:
        _show(describe(layout))
    return 0


def describe(layout: Layout) -> dict[str, Any]:
    """Return the object that `--json` prints; its keys are listed in this module's docstring."""
    groups = [(group[0].cards, [part.label for part in group]) for group in layout.groups]
    return {
        "schema": 1,
        "layout": str(layout),
        "mapping": layout.to_mapping(),
        "cards": layout.cards,
        "groups": [{"cards": [cards[0], cards[-1]], "parts": labels} for cards, labels in groups],
        "parts": [_part(part, group) for group in layout.groups for part in group],
        "pairs": [pair._asdict() | {"train": pair.train.label, "infer": pair.infer.label} for pair in layout.pairs],
    }


def _part(part: Part, group: tuple[Part, ...]) -> dict[str, Any]:
    plain = ("label", "backend", "name", "role", "world", "instances", "cards_per_instance", "frozen", "via")
    told = {o.name: o.default for o in (*part.spec.options, *PART_OPTIONS) if o.listed}
    return {key: getattr(part, key) for key in plain} | {
        "status": part.spec.status,
        "summary": part.spec.summary,
        "axes": _titled(part, part.axes),
        "expert_axes": _titled(part, part.expert_axes) if part.expert_axes is not None else None,
        "expert": part.expert._asdict() if part.expert else None,
        "cards": [part.cards[0], part.cards[-1]],
        "colocated_with": [other.label for other in group if other is not part],
        "options": {
            name: {"value": value, "default": name not in part.options}
            for name, value in {**told, **part.options}.items()
        },
        "ranks": [[rank, *part.place(rank)] for rank in range(part.world)],
    }


def _titled(part: Part, axes: Mapping[str, int]) -> dict[str, Any]:
    return {name: {"size": size, "title": part.spec.axis_table()[name].title} for name, size in axes.items()}


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(markup=False, highlight=False, emoji=False)
    console.print(f"{found['layout']}\nneeds {counted(found['cards'])}", soft_wrap=True)
    for titles, rows in _TABLES.items():
        table = Table(*(Column(title, overflow="fold") for title in ("part", *titles)), box=None, pad_edge=False)
        for part in found["parts"]:
            for row in rows(part):
                table.add_row(part["label"], *row)
        console.print("", table)
    for pair in found["pairs"]:
        where = "colocated" if pair["colocated"] else "separate"
        console.print(f"weights: {pair['train']} -> {pair['infer']}, {where}, via {_transfer(pair['via'])}")


def _transfer(name: str | None) -> str:
    from powertrain.registry import Registry

    if name is None:
        return "the first transfer that fits"
    spec = Registry().specs("transfer").get(name)
    return f"{name} (not there yet)" if spec and spec.status == "planned" else name


def _summary(part: dict[str, Any]) -> _Rows:
    backend = part["backend"] + ("" if part["status"] == "ready" else " (engine not there yet)")
    role = part["role"] + (", frozen" if part["frozen"] else "")
    cards = f"{part['world']} ({_span(*part['cards'])})"
    instances = f"{part['instances']} x {part['cards_per_instance']} cards"
    yield backend, role, cards, instances, ", ".join(part["colocated_with"]) or "nothing"


def _sizes(part: dict[str, Any]) -> _Rows:
    """Yield all axes, and what follows from them for expert layers."""
    for prefix, axes, layers in (("", part["axes"], ""), ("ffn ", part["expert_axes"] or {}, ", expert layers")):
        for name, axis in axes.items():
            yield f"{prefix}{name}", str(axis["size"]), axis["title"] + layers
    for name, size in (part["expert"] or {}).items():
        yield f"expert {name}", str(size), _EXPERT[name]


def _placement(part: dict[str, Any]) -> _Rows:
    """Yield every rank of a small part, of others every instance, and of very many the first three and the last."""
    if part["world"] <= _LISTED:
        for _, card, instance, inner, coordinates in part["ranks"]:
            yield str(instance), str(inner), str(card), " ".join(f"{axis}={i}" for axis, i in coordinates.items())
        return
    size, cards = part["cards_per_instance"], range(part["cards"][0], part["cards"][1] + 1)
    rows = [(str(i), _span(0, size - 1), _span(first, first + size - 1), "") for i, first in enumerate(cards[::size])]
    if len(rows) > _LISTED:
        rows[3:-1] = [("…", "…", "…", f"{len(rows) - 4} more")]
    yield from rows


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _options(part: dict[str, Any]) -> _Rows:
    for name, option in part["options"].items():
        yield name, json.dumps(option["value"]), "default" if option["default"] else "given"


_TABLES: Final[dict[tuple[str, ...], Callable[[dict[str, Any]], _Rows]]] = {
    ("backend", "role", "cards", "instances", "colocated with"): _summary,
    ("axis", "size", "meaning"): _sizes,
    ("instance", "rank", "card", "coordinates"): _placement,
    ("option", "value", ""): _options,
}
"""Column titles behind "part", and the rows of one part."""
