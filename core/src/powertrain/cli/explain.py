"""`powertrain explain 'STRING'`: what a config string means, before anything starts.

`--json` prints one object: `schema` (1; grows when a key changes its meaning), `layout` (canonical text), `mapping`
(the same as a plain mapping), `cards` (slots needed), `groups` (`cards` as [first, last], `parts` as labels),
`parts` and `pairs` (`train`, `infer`, `via`, `colocated`). A part has `label`, `backend`, `name`, `role`, `status`,
`summary`, `axes` and `expert_axes` (name -> `size`, `title`), `expert` (`ep`, `etp`, `dp`, or null), `world`,
`instances`, `cards_per_instance`, `cards` as [first, last], `colocated_with`, `frozen`, `via`, `options` (name ->
`value`, `default`: whether it was not given) and `ranks`, one `[rank, card, instance, rank_in_instance, coordinates]`
for each rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from powertrain.layout import PART_OPTIONS, Layout, Part, parse_layout

if TYPE_CHECKING:
    from rich.table import Table

_LISTED = 16
"""Parts of at most so many ranks are listed rank by rank, others by instance."""
_EXPERT = {
    "ep": "ranks that share the experts",
    "etp": "ranks that share one expert's weights",
    "dp": "copies of the experts",
}


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
        _show(layout)
    return 0


def describe(layout: Layout) -> dict[str, Any]:
    """Return the object that `--json` prints; its keys are listed in this module's docstring."""
    return {
        "schema": 1,
        "layout": str(layout),
        "mapping": layout.to_mapping(),
        "cards": layout.cards,
        "groups": [{"cards": _ends(group[0].cards), "parts": [p.label for p in group]} for group in layout.groups],
        "parts": [_part(part, layout) for part in layout.parts],
        "pairs": [
            {"train": pair.train.label, "infer": pair.infer.label, "via": pair.via, "colocated": pair.colocated}
            for pair in layout.pairs
        ],
    }


def _ends(cards: range) -> list[int]:
    return [cards[0], cards[-1]]


def _part(part: Part, layout: Layout) -> dict[str, Any]:
    table = part.spec.axis_table()
    expert = part.expert
    places = map(part.place, range(part.world))
    return {
        "label": part.label,
        "backend": part.backend,
        "name": part.name,
        "role": part.role,
        "status": part.spec.status,
        "summary": part.spec.summary,
        "axes": {name: {"size": size, "title": table[name].title} for name, size in part.axes.items()},
        "expert_axes": None
        if part.expert_axes is None
        else {name: {"size": size, "title": table[name].title} for name, size in part.expert_axes.items()},
        "expert": {"ep": expert.ep, "etp": expert.etp, "dp": expert.dp} if expert else None,
        "world": part.world,
        "instances": part.instances,
        "cards_per_instance": part.cards_per_instance,
        "cards": _ends(part.cards),
        "colocated_with": [p.label for p in layout.parts if p.first_card == part.first_card and p is not part],
        "frozen": part.frozen,
        "via": part.via,
        "options": {
            option.name: {
                "value": part.options.get(option.name, option.default),
                "default": option.name not in part.options,
            }
            for option in (*part.spec.options, *PART_OPTIONS)
        },
        "ranks": [
            [rank, place.card, place.instance, place.rank_in_instance, dict(place.coordinates)]
            for rank, place in enumerate(places)
        ],
    }


def _show(layout: Layout) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    found = describe(layout)
    console.print(f"{found['layout']}\nneeds {found['cards']} cards\n", soft_wrap=True)
    table = _table("part", "backend", "role", "cards", "instances", "placement")
    for part in found["parts"]:
        others = part["colocated_with"]
        table.add_row(
            part["label"],
            part["backend"] + ("" if part["status"] == "ready" else " (engine not there yet)"),
            part["role"] + (", frozen" if part["frozen"] else ""),
            f"{part['world']} ({_span(*part['cards'])})",
            f"{part['instances']} x {part['cards_per_instance']} cards",
            f"colocated with {', '.join(others)}" if others else "separate",
        )
    console.print(table)
    console.print()
    sizes = _table("part", "axis", "size", "meaning")
    for part in found["parts"]:
        for size in _sizes(part):
            sizes.add_row(part["label"], *size)
    console.print(sizes)
    console.print()
    ranks = _table("part", "instance", "rank", "card", "coordinates")
    for part in found["parts"]:
        for row in _placement(part):
            ranks.add_row(part["label"], *row)
    console.print(ranks)
    console.print()
    options = _table("part", "option", "value", "")
    for part in found["parts"]:
        for name, option in part["options"].items():
            options.add_row(
                part["label"], name, json.dumps(option["value"]), "default" if option["default"] else "given"
            )
    console.print(options)
    for pair in found["pairs"]:
        way = f"via {pair['via']}" if pair["via"] else "via the first transfer that fits"
        where = "colocated" if pair["colocated"] else "separate"
        console.print(f"weights: {pair['train']} -> {pair['infer']}, {where}, {way}")


def _table(*titles: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _sizes(part: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (axis, size, meaning) of all axes, and what follows for expert layers."""
    rows = [(name, str(axis["size"]), axis["title"]) for name, axis in part["axes"].items()]
    section = part["expert_axes"] or {}
    rows += [(f"ffn {name}", str(axis["size"]), f"{axis['title']}, expert layers") for name, axis in section.items()]
    if part["expert"] and not section:
        rows += [(f"expert {name}", str(size), _EXPERT[name]) for name, size in part["expert"].items()]
    return rows


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _placement(part: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return (instance, ranks in it, cards, coordinates), by rank for a small part, else by instance."""
    if part["world"] <= _LISTED:
        return [
            (str(instance), str(inner), str(card), " ".join(f"{axis}={i}" for axis, i in at.items()))
            for _, card, instance, inner, at in part["ranks"]
        ]
    size, first = part["cards_per_instance"], part["cards"][0]
    rows = [
        (str(i), _span(0, size - 1), _span(first + i * size, first + (i + 1) * size - 1), "")
        for i in range(part["instances"])
    ]
    if len(rows) > _LISTED:
        rows = [*rows[:3], ("…", "…", "…", f"{len(rows) - 4} more"), rows[-1]]
    return rows
