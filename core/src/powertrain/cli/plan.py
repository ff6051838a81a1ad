"""`powertrain plan 'STRING' --model FOLDER`: what an update of the weights will move, before anything starts.

Worked out from the model's config.json and the layout alone: no weights, no engine, no card. `--png` draws a heat map.

`--json` prints one object: `schema` (1; grows when a key changes its meaning), `layout` (canonical text), `model`
(`type`, `dtype`, `tensors`: how many), `speeds` (GB/s of `memory`, `link`, `network`, `host`) and `pairs`. A pair has
`train`, `infer`, `colocated`; `bytes` that leave the trainer; `buckets` (`count`, `limit`, `largest`, in bytes);
`peak`, the most bytes that one rank has staged for one bucket: of a `source` and of a `sink`; `seconds`: a lower
bound, and `bound`: what sets it; `transfer` (null where none fits) and `why`, a line for each installed one; and
`ranks`: for each set of equal instances, `instances` and `bytes`, a row for each training rank and in it a number for
each rank of one instance.

The lower bound lets every card move its own bytes at full speed with nobody in its way: what a sink's rank reads on its
own card at `memory`, from cards of its node at `link`, from others at `network`, and what a training rank sends, once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, cast

from powertrain.errors import ConfigError
from powertrain.layout import Layout, Pair, parse_layout
from powertrain.registry import Registry

if TYPE_CHECKING:
    from powertrain.specs import TransferSpec
    from powertrain.weights.outline import Outline

SPEEDS: Final = {
    "memory": (2000.0, "copy within one card's memory"),
    "link": (450.0, "between cards of a node, each"),
    "network": (50.0, "between nodes, for each card (400 Gb/s)"),
    "host": (20.0, "copy in host memory"),
}
"""Name of a speed -> its default in GB/s, and what it is."""
_SHOWN: Final = 16
_MB: Final = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `powertrain plan`."""
    parser.add_argument("layout", help="config string with a training and an inference part")
    parser.add_argument("--model", required=True, metavar="FOLDER", help="folder with the model's config.json")
    parser.add_argument("--dtype", help="dtype of the run (the config's own)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--png", metavar="FILE", help="draw the bytes between all pairs of ranks")
    parser.add_argument("--bucket-mb", type=int, default=1024, help="most MiB of a bucket (1024)")
    parser.add_argument("--cards", type=int, default=8, help="cards of each node (8)")
    for name, (speed, text) in SPEEDS.items():
        parser.add_argument(f"--{name}", type=float, default=speed, metavar="GB/S", help=f"{text} ({speed:g})")


def execute(args: argparse.Namespace) -> int:
    """Print the plan of every pair of `args.layout`; returns 0. ConfigError for what cannot be planned so."""
    from powertrain.tensors.checkpoint import dtype_of, read_config

    registry, config = Registry(), read_config(args.model)
    layout, config["dtype"] = parse_layout(args.layout, registry=registry), args.dtype or dtype_of(config)
    speeds = {name: getattr(args, name) for name in SPEEDS}
    if not layout.pairs or min(*speeds.values(), args.cards) <= 0:
        message = f"{args.layout!r} has {len(layout.pairs)} pairs that move weights; speeds and cards are above 0"
        raise ConfigError(message)
    plans = [_outline(pair, config, registry, args.bucket_mb * _MB) for pair in layout.pairs]
    found: dict[str, Any] = {
        "schema": 1,
        "layout": str(layout),
        "model": {"type": config["model_type"], "dtype": config["dtype"], "tensors": len(plans[0].source.tensors)},
        "speeds": speeds,
        "pairs": [
            _pair(pair, plan, layout, registry, speeds, args.cards)
            | {"buckets": {"count": len(plan.buckets), "limit": args.bucket_mb * _MB, "largest": max(plan.buckets)}}
            for pair, plan in zip(layout.pairs, plans, strict=True)
        ],
    }
    if args.png:
        _draw(found["pairs"], args.png)
    if args.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        _show(found)
    return 0


def _outline(pair: Pair, config: dict[str, Any], registry: Registry, bucket_bytes: int) -> Outline:
    from powertrain.weights.outline import outline

    for part in (pair.train, pair.infer):
        if not part.spec.manifest:
            message = f"backend {part.backend!r} has no static manifest; only its running engine can tell what it holds"
            raise ConfigError(message)
    source, sink = (registry.load_class(part.spec, "manifest")(config, part) for part in (pair.train, pair.infer))
    return outline(source, [sink] * pair.infer.instances, bucket_bytes=bucket_bytes)


def _pair(
    pair: Pair, plan: Outline, layout: Layout, registry: Registry, speeds: dict[str, float], cards: int
) -> dict[str, Any]:
    tables = plan.tables()
    sources, sinks = range(plan.source.world), [range(plan.distinct[plan.engines[e]].world) for (e, *_), _ in tables]
    peak, (transfer, why) = plan.peaks(), _transfer(pair, layout, registry, cards)
    seconds, bound = _bound(pair, plan, tables, speeds, cards)
    return {
        "train": pair.train.label,
        "infer": pair.infer.label,
        "colocated": pair.colocated,
        "bytes": plan.bytes,
        "peak": {"source": peak[0], "sink": peak[1]},
        "seconds": seconds,
        "bound": bound,
        "transfer": transfer,
        "why": why,
        "ranks": [
            {"instances": engines, "bytes": [[table[s, r] for r in ranks] for s in sources]}
            for (engines, table), ranks in zip(tables, sinks, strict=True)
        ],
    }


def _bound(pair: Pair, plan: Outline, tables: list[Any], speeds: dict[str, float], cards: int) -> tuple[float, str]:
    """Return the lower bound in seconds, and which rank and way set it."""
    first, size = pair.infer.first_card, pair.infer.cards_per_instance
    ways = Counter[tuple[str, str]]()
    for engines, table in tables:
        for (source, rank), count in table.items():
            there = pair.train.first_card + source
            # Of engines on cards of their own, the first or the last is the farthest from the trainer.
            for engine in engines if pair.colocated else sorted({engines[0], engines[-1]}):
                here = first + engine * size + rank
                way = "memory" if here == there else "link" if here // cards == there // cards else "network"
                ways[f"{pair.infer.label} rank {engine * size + rank} reads", way] += count
    if not pair.colocated:
        one_node = max(pair.train.cards[-1], pair.infer.cards[-1]) < cards
        for rank, count in plan.sent().items():
            ways[f"{pair.train.label} rank {rank} sends", "link" if one_node else "network"] += count
    times = {(what, way): count / speeds[way] / 1e9 for (what, way), count in ways.items()}
    what, way = max(times, key=lambda key: times[key])
    return times[what, way], f"{what} {ways[what, way]} bytes at {way}"


def _transfer(pair: Pair, layout: Layout, registry: Registry, cards: int) -> tuple[str | None, list[str]]:
    """Return the transfer that a run on cards would pick, and a line about each installed one."""
    ends = (pair.train, pair.infer)
    inline = all(p.world == 1 and not p.python and p.inline is not False and p.first_card == 0 for p in ends)
    one_node = layout.cards <= cards
    reach = {"network"} | ({"host"} if one_node else set()) | ({"device"} if pair.colocated else set())
    reach |= {"process"} if inline else set()
    fits, why = [], []
    for name, spec in cast("dict[str, TransferSpec]", registry.specs("transfer")).items():
        state = (
            "fits" if reach & set(spec.reach) else f"takes {'/'.join(spec.reach)}, here is {'/'.join(sorted(reach))}"
        )
        ready = spec.status != "planned" and pair.via in {None, name}
        if state == "fits" and ready:
            fits.append((spec.rank, name))
        state += " (not there yet)" if spec.status == "planned" else "" if ready else f", but {pair.via} is named"
        why.append(f"{name}: {state}, rank {spec.rank}")
    return (min(fits)[1] if fits else None), why


def _draw(pairs: list[dict[str, Any]], path: str) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(pairs), squeeze=False, figsize=(7 * len(pairs), 6))
    for pair, axis in zip(pairs, axes[0], strict=True):
        rows = {engine: same["bytes"] for same in pair["ranks"] for engine in same["instances"]}
        whole = [[n / _MB for engine in sorted(rows) for n in rows[engine][s]] for s in range(len(rows[0]))]
        image = axis.imshow(whole, aspect="auto", interpolation="nearest")
        axis.set(xlabel=f"rank of {pair['infer']}", ylabel=f"rank of {pair['train']}", title="MiB from rank to rank")
        figure.colorbar(image, ax=axis)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else 160)
    model = found["model"]
    console.print(f"{found['layout']}\n{model['type']}, {model['tensors']} tensors, {model['dtype']}", soft_wrap=True)
    for pair in found["pairs"]:
        buckets, peak = pair["buckets"], pair["peak"]
        where = "colocated" if pair["colocated"] else "separate"
        for line in (
            f"\nweights: {pair['train']} -> {pair['infer']}, {where}: {_size(pair['bytes'])} leave the trainer",
            f"buckets: {buckets['count']}, the largest {_size(buckets['largest'])} of {_size(buckets['limit'])}",
            f"staged for one bucket: {_size(peak['source'])} on a training rank, {_size(peak['sink'])} on a sink's",
            f"at least {pair['seconds']:.3g} s: {pair['bound']}",
            f"transfer: {pair['transfer'] or 'none that is there fits'}",
            *(f"    {line}" for line in pair["why"]),
        ):
            console.print(line, soft_wrap=True)
        for same in pair["ranks"]:
            rows, engines = same["bytes"], same["instances"]
            table = Table(
                "MiB from", *(f"{rank}" for rank in range(min(len(rows[0]), _SHOWN))), box=None, pad_edge=False
            )
            for rank, row in enumerate(rows[:_SHOWN]):
                table.add_row(f"rank {rank}", *(f"{n / _MB:.3g}" for n in row[:_SHOWN]))
            rest = "" if max(len(rows), len(rows[0])) <= _SHOWN else "; --json has all"
            console.print(f"\nto each rank of instance {engines[0]} ({len(engines)} are alike{rest})", table)


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e8 else f"{count / 1e6:.3g} MB"
