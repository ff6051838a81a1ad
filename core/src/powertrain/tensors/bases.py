"""The option `delta` of a transfer: bases, which both sides keep of the update before, and who may build on them.

A base is the bytes of an update as they travelled, labelled with its weight version. Changes alone are sent only if
every rank of both sides holds the base of the last update that went well, which the driver asks before a byte moves.
Nothing is left to build on by an update that fails or is cancelled, a rank that was started anew, or another plan: then
all bytes go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from powertrain.errors import TransferError
from powertrain.tensors import delta
from powertrain.tensors.planned import PlannedTransfer
from powertrain.tensors.views import device_of
from powertrain.weights.boxes import FLOATS, ITEM_SIZE
from powertrain.weights.transaction import together

if TYPE_CHECKING:
    from powertrain.weights import Manifest, TransferPlan, TransferReport, Update
    from powertrain.weights.plan import Block, Read


class Bases:
    """What one rank keeps of a pair's last update, by keys of its endpoint's own. version: its label, "" for none.

    tally: since the last `update` began, `elements` that were compared, and those `changed`.
    """

    def __init__(self) -> None:
        self.version = ""
        self.tally: Counter[str] = Counter()
        self._parts: dict[Any, torch.Tensor] = {}

    @contextmanager
    def update(self, base: str, version: str) -> Iterator[None]:
        """Run an update that builds on `base` ("" where all bytes go); the label is the new version at its end alone.

        version: "" where nothing is to be kept.
        """
        held, self.version = self.version, ""
        self.tally.clear()
        if base and base != held:
            self._parts.clear()
            text = f"changes since version {base} were sent, and this rank holds {held or 'none'}"
            message = f"{text}; the next update sends all"
            raise TransferError(message, phase="gather")
        if not version:
            self._parts.clear()
        yield
        self.version = version

    def outgoing(self, key: Any, new: torch.Tensor, layout: delta.Spans, *, build: bool) -> torch.Tensor:
        """Keep flat bytes that nobody will change, and return what is to be sent: their changes, or all of them."""
        old = self._parts.get(key) if build else None
        self._parts[key] = new
        if old is None:
            return new
        data, changed = delta.encode(new, old, layout)
        self.tally["elements"] += sum(count // item for item, count in layout)
        self.tally["changed"] += changed
        return new if data is None else data

    def room(self, key: Any, count: int) -> torch.Tensor:
        """Return the memory of a base in host memory, for all its bytes to arrive in."""
        if key not in self._parts:
            self._parts[key] = torch.empty(count, dtype=torch.uint8)
        return self._parts[key]

    def keep(self, key: Any, data: torch.Tensor) -> None:
        """Keep all bytes of a part, which nobody else will change."""
        self._parts[key] = data

    def part(self, key: Any) -> torch.Tensor:
        """Return a part's bytes."""
        return self._parts[key]


def where(weights: Any, option: str) -> torch.device:
    """Return where bases lie: in host memory, or beside the weights (option "device")."""
    return device_of(weights) if option == "device" else torch.device("cpu")


def in_engines_dtypes(plan: TransferPlan, manifests: Sequence[Sequence[Manifest]]) -> TransferPlan:
    """Return the plan with blocks of a smaller dtype where every engine casts to that one; manifests: the engines'.

    So the trainer casts before it sends, and what rounding leaves as it was is no change.
    """
    if plan.kind != "full":
        return plan
    held: dict[int, set[str]] = {}
    for engine, ranks in zip(manifests, plan.reads, strict=True):
        for manifest, reads in zip(engine, ranks, strict=True):
            entries = manifest.by_name()
            for read in reads:
                entry = entries[read.name]
                plain = entry.transform in {"", "transpose"} and not entry.scales
                held.setdefault(id(read.block), set()).add(entry.dtype if plain else "")
    made: dict[int, Block] = {}
    for block in plan.blocks:
        wanted = held.get(id(block), set())
        dtype = next(iter(wanted)) if len(wanted) == 1 else ""
        smaller = {dtype, block.dtype} <= set(FLOATS) and ITEM_SIZE[dtype] < ITEM_SIZE[block.dtype]
        made[id(block)] = replace(block, dtype=dtype) if smaller else block

    def cast(read: Read) -> Read:
        block = made[id(read.block)]
        return read if block is read.block else replace(read, block=block)

    made_reads = tuple(tuple(tuple(cast(read) for read in ranks) for ranks in engine) for engine in plan.reads)
    return replace(plan, blocks=tuple(made.values()), reads=made_reads)


class DeltaTransfer(PlannedTransfer):
    """The driver's half of a transfer with the option `delta`. Endpoints have `base(session)`: the label of theirs.

    delta: where both sides keep bases, "host" or "device", or "off". tally: what came of this update.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self.delta = str(options.get("delta") or "off")
        self.tally: Counter[str] = Counter()
        self._base = self._last = ""
        self._cast: TransferPlan | None = None

    async def plan(self, *sides: Any, deadline: float) -> TransferPlan:
        """Plan as ever, but with weights cast by the trainer where changes are looked for."""
        plan = await super().plan(*sides, deadline=deadline)
        if self.delta != "off" and plan is not self._cast:
            assert self._made is not None
            plan = self._cast = in_engines_dtypes(plan, self._made[0][1:])
            self._made = self._made[0], plan
        return plan

    async def _push(self, update: Update, *, deadline: float, pause_mode: str) -> TransferReport:
        """Run one update; only one that ends well is what the next may build on."""
        self._last, self._base = self._base, ""
        self.tally.clear()
        report = await super()._push(update, deadline=deadline, pause_mode=pause_mode)
        if self.delta == "off" or update.kind != "full":
            return report
        self._base = str(update.version)
        details = {"delta": self.tally["saved"] / max(1, self.tally["all"])}
        if self.tally["elements"]:
            details["changed"] = self.tally["changed"] / self.tally["elements"]
        return report.noting(**details)

    def _count(self, sent: Sequence[Mapping[str, int]]) -> None:
        """Add up what the trainer's ranks say: `bytes`, `all` that these stand for, and `saved` of it that went as
        changes; and the tallies of their bases.
        """
        for rank in sent:
            self.tally.update(rank)

    async def _agree(self, *, deadline: float) -> str:
        """Return the version that every rank of both sides holds the base of and the last update brought, else ""."""
        if not self._last:
            return ""
        told = await together(self._call(handle, "base", deadline=deadline) for handle in [self.source, *self.sinks])
        return self._last if all(label == self._last for ranks in told for label in ranks) else ""
