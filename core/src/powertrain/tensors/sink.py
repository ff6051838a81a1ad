"""A weight sink for torch engines: the update's states, generic copying by boxes, and proof that all was written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from powertrain.errors import StateError, TransferError, UnfitError
from powertrain.interfaces.weights import Piece, WeightSink
from powertrain.tensors.copies import CopyProgram, copy_into
from powertrain.tensors.sharing import lent
from powertrain.tensors.views import block_view, narrowed
from powertrain.weights import Box, Entry, Manifest
from powertrain.weights.boxes import FLOATS
from powertrain.weights.ranges import Range, left_of, overlap, text

if TYPE_CHECKING:
    from powertrain.interfaces.weights import WeightSource
    from powertrain.weights import Update


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype without its prefix ("bfloat16")."""
    return str(dtype).removeprefix("torch.")


def whole_manifest(
    named: Mapping[str, torch.Tensor], *, rank: int = 0, world: int = 1, kind: str = "full", casts: bool = False
) -> Manifest:
    """Return the manifest of a rank that holds every tensor whole; a storage's name is its tensor's.

    A tensor that stands under several names (the same object, or the same memory) is listed under the first and the
    others become tied aliases. casts: floating entries accept every dtype of `FLOATS`.
    """
    entries: list[Entry] = []
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in named.items():
        key = (tensor.data_ptr(), tensor.storage_offset(), tuple(tensor.shape), tensor.dtype)
        if tensor.numel() and seen.setdefault(key, name) != name:
            tied[name] = seen[key]
            continue
        dtype = dtype_name(tensor.dtype)
        box = Box((0,) * tensor.dim(), tuple(tensor.shape), name, 0, tuple(tensor.stride()))
        accepts = tuple(other for other in FLOATS if other != dtype) if casts and dtype in FLOATS else ()
        entries.append(Entry(name, dtype, tuple(tensor.shape), (box,), accepts))
    return Manifest(rank, world, tuple(entries), tied, kind)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Pieces that `BoxSink.prepare` has checked. program: their copies. written: the ranges, by tensor. whole: they
    are all that an update must write. memory: where our storages lay.
    """

    program: CopyProgram
    written: Mapping[str, list[Range]]
    whole: bool
    memory: tuple[int, ...]


class BoxSink(WeightSink):
    """Writes pieces into the boxes of a manifest.

    Engines subclass it for what they derive from weights: `refresh` (caches, fused copies), `add_adapter` and
    `drop_adapter`. Not thread-safe: the host calls one method at a time.

    Sharing: `share` makes storages alias a source's memory in the same process, so that no byte moves; from then on
    `guard` refuses when the source has changed since the last published update.
    """

    def __init__(self, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
        self._manifest = manifest
        self._tensors = tensors
        self._entries = manifest.by_name()
        self._names = {**{name: name for name in self._entries}, **manifest.tied}
        self._state = "steady"
        self._intact = True
        self._update: Update | None = None
        self._written: dict[str, list[Range]] = {}
        self._whole = False
        self._adapter: dict[str, list[tuple[Range, torch.Tensor]]] = {}
        self._shared: WeightSource | None = None
        self._offered: tuple[WeightSource, int] | None = None
        self._changes = 0
        self.version = "0.0"
        """Text of the version that is published; "0.0" until the engine's first `resume`."""
        self.base_version = "0.0"
        """Text of the last published version that was not an adapter's."""

    # ---- what engines override
    def refresh(self) -> None:
        """Make derived state anew from the weights; called inside `finish` of every update but an adapter's."""

    def add_adapter(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Register a complete adapter under its versioned name; called once, inside `finish` of an adapter's update.

        tensors: PEFT-standard name -> tensor that the engine may keep. Must raise when a key matches no module.
        """
        message = f"{type(self).__name__} takes no adapters; send full weights"
        raise TransferError(message, phase="finish")

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter that `add_adapter` registered and whose update was given up before it was published."""

    def converted(self, entry: Entry, piece: Piece) -> Piece:
        """Return what a piece becomes by the transform that its entry names; core knows how to transpose."""
        if entry.transform != "transpose":
            message = (
                f"{entry.name!r} names the transform {entry.transform!r}, which {type(self).__name__} does not have"
            )
            raise TransferError(message, phase="load")
        return Piece(piece.name, piece.start[::-1], piece.tensor.permute(*reversed(range(piece.tensor.dim()))))

    # ---- the sink's interface
    @property
    def state(self) -> str:
        """One of steady, updating, finished, unfit."""
        return self._state

    def manifest(self) -> Manifest:
        """Return what this rank wants."""
        return self._manifest

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return storage name -> local tensor."""
        return self._tensors

    def begin(self, update: Update) -> None:
        """Open an update; StateError while one is open, TransferError for a kind that this sink does not take."""
        if self._state == "updating":
            message = (
                f"update {update.version} cannot begin: update {self._opened.version} is still open; abort it first"
            )
            raise StateError(message)
        if update.kind not in {"full", "adapter"} or (update.kind == "adapter" and not update.adapter):
            message = f"this sink takes full weights and named adapters, not kind {update.kind!r} ({update.adapter!r})"
            raise TransferError(message, phase="make_room")
        self.abort()
        if update.kind == "adapter" and self._state == "unfit":
            message = f"adapter {update.adapter!r} cannot heal the base weights; push full weights first"
            raise UnfitError(message)
        self._update, self._state = update, "updating"
        self._written, self._adapter, self._offered, self._whole = {}, {}, None, False

    def apply(self, pieces: Iterable[Piece]) -> None:
        """Copy pieces into place, cast where the entry accepts it; a piece that does not fit is not begun."""
        self._expect("updating", "apply")
        on_device = False
        if self._opened.kind == "adapter":
            for piece in pieces:
                place = (tuple(piece.start), tuple(piece.tensor.shape))
                parts = self._adapter.setdefault(piece.name, [])
                _check_new(piece.name, place, [old for old, _ in parts])
                parts.append((place, piece.tensor.clone()))
                on_device |= piece.tensor.is_cuda
        else:
            self.unshare()
            with torch.no_grad():
                for piece in pieces:
                    for target, source in self._targets(piece):
                        self._intact = False
                        copy_into(target, source)
                        on_device |= target.is_cuda or source.is_cuda
        if on_device:
            torch.cuda.synchronize()

    def prepare(self, pieces: Iterable[Piece]) -> Prepared:
        """Check pieces as `apply` does and work out their copies, for `replay` to run in any number of updates.

        For full weights. The pieces' memory must stay where it is; what lies in it may change.
        """
        kept, self._written = self._written, {}
        try:
            program = CopyProgram(pair for piece in pieces for pair in self._targets(piece))
            whole = next(self._gaps(), None) is None
            return Prepared(program, self._written, whole, self._memory())
        finally:
            self._written = kept

    def replay(self, prepared: Prepared) -> bool:
        """Write prepared pieces, complete when it returns, device included; False (nothing done) where our storages
        have moved since, so that the pieces must be prepared again.
        """
        self._expect("updating", "replay")
        self.unshare()
        if self._opened.kind == "adapter" or prepared.memory != self._memory():
            return False
        for name, places in prepared.written.items() if self._written else ():
            for place in places:
                _check_new(name, place, self._written.get(name, []))
        self._intact = False
        prepared.program.run()
        if prepared.program.on_device:
            torch.cuda.synchronize()
        self._whole = prepared.whole
        for name, places in prepared.written.items():
            self._written.setdefault(name, []).extend(places)
        return True

    def finish(self) -> None:
        """Check that every element was written, refresh derived state (or register the adapter); state finished."""
        self._expect("updating", "finish")
        update = self._opened
        if update.kind == "adapter":
            tensors = {name: _joined(name, parts) for name, parts in self._adapter.items()}
            self._adapter = {}
            self.add_adapter(update.adapter, update.adapter_config, tensors)
        else:
            if self._offered is None and not self._whole:
                self._check_written()
            self.refresh()
        self._state = "finished"

    def publish(self, version: str | None) -> None:
        """Make a finished update the published one, or (None) go on with the old one; see `WeightSink.publish`.

        A steady sink that never had a version takes its first one here.
        """
        self.check_fit()
        if self._state == "steady":
            if version is not None and version != self.version:
                if self.version != "0.0":
                    message = f"the engine carries version {self.version}; no update to {version} has finished"
                    raise StateError(message)
                self.version = self.base_version = version
            return
        self._expect("finished", "publish")
        update = self._opened
        if version != str(update.version):
            message = f"version {version} cannot be published: the update that has finished is {update.version}"
            raise StateError(message)
        self.version = version
        if update.kind != "adapter":
            self.base_version = version
            self._shared, self._changes = self._offered or (None, 0)
            self._intact = True
        self._state, self._update, self._offered = "steady", None, None

    def abort(self) -> None:
        """Give the open update up: steady when no weight was touched, else unfit."""
        if self._state not in {"updating", "finished"}:
            return
        if self._state == "finished" and self._opened.kind == "adapter":
            self.drop_adapter(self._opened.adapter)
        self._state = "steady" if self._intact else "unfit"
        self._update, self._offered, self._written, self._adapter = None, None, {}, {}

    def check_fit(self) -> None:
        """Raise UnfitError while no request can be answered."""
        if self._state == "unfit":
            message = f"the weights are neither version {self.version} nor another; an update must heal them first"
            raise UnfitError(message)

    # ---- sharing
    def share(self, source: WeightSource, pieces: Iterable[Piece]) -> bool:
        """Alias the source's memory in place of copying; True when each storage lies at the sender as it does here.

        False (nothing changed) when a dtype, device, stride or place differs: the caller then copies. The update
        counts as written whole. From its first change to the aliased memory the sink is guarded.
        """
        self._expect("updating", "share")
        found = {self._names.get(piece.name, piece.name): piece for piece in pieces}
        memory = lent(self._manifest, self._tensors, found)
        if memory is None:
            return False
        for name, tensor in memory.items():
            if self._tensors[name].data_ptr() != tensor.data_ptr():
                self._intact = False
                self._tensors[name].data = tensor
        self._shared = source
        self._offered = (source, source.changes())
        return True

    def guard(self) -> None:
        """Raise StateError when the weights are shared and have changed under the published version."""
        if self._shared is not None and self._shared.changes() != self._changes:
            message = f"weights have changed under version {self.version}; push first"
            raise StateError(message)

    def unshare(self, *, copy: bool = True) -> None:
        """Give every storage memory of its own, so that nothing is written into the trainer's; before a copy or a move.

        copy: False where the caller is about to move all storages to another device, which gives them new memory.
        Weights that have changed since they were published are neither the old nor a new version: unfit.
        """
        if self._shared is not None:
            if self._shared.changes() != self._changes:
                self._intact = False
                self._state = "unfit" if self._state == "steady" else self._state
            for tensor in {id(t): t for t in self._tensors.values()}.values() if copy else ():
                tensor.data = tensor.detach().clone()
            self._shared = None

    # ---- helpers
    @property
    def _opened(self) -> Update:
        assert self._update is not None
        return self._update

    def _expect(self, state: str, method: str) -> None:
        if self._state != state:
            message = f"the sink's {method}() was called in state {self._state!r}; it is allowed in: {state}"
            raise StateError(message)

    def _targets(self, piece: Piece) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (place in our memory, part of the piece) pairs after every check of the piece."""
        name = self._names.get(piece.name)
        if name is None:
            message = f"tensor {piece.name!r} arrived and this engine has none of that name"
            raise TransferError(message, phase="load")
        entry = self._entries[name]
        piece = self.converted(entry, piece) if entry.transform else piece
        place = (tuple(piece.start), tuple(piece.tensor.shape))
        sent = dtype_name(piece.tensor.dtype)
        if sent != entry.dtype and sent not in entry.accepts:
            message = f"tensor {name!r} arrived as {sent}; the engine holds {entry.dtype} and does not cast"
            raise TransferError(message, phase="load")
        if len(place[0]) != len(entry.shape) or len(place[1]) != len(entry.shape):
            message = f"a piece of {name!r} has {len(place[1])} dimensions; the tensor has {len(entry.shape)}"
            raise TransferError(message, phase="load")
        done = self._written.setdefault(name, [])
        common = [(box, part) for box in entry.boxes if (part := overlap(place, (box.start, box.size)))]
        if sum(prod(part[1]) for _, part in common) != prod(place[1]):
            message = f"{name!r}{text(place)} arrived; this rank does not hold all of that range"
            raise TransferError(message, phase="load")
        _check_new(name, place, done)
        done.append(place)
        pairs = []
        for box, (start, size) in common:
            target = block_view(self._tensors[box.storage], box.place(start), size, box.stride)
            pairs.append((target, narrowed(piece.tensor, piece.start, start, size)))
        return pairs

    def _memory(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._tensors.values())

    def _gaps(self) -> Iterator[tuple[str, Range]]:
        """Yield each range that this update had to write and has not."""
        for entry in self._manifest:
            done = self._written.get(entry.name, [])
            if (entry.frozen and not done) or sum(prod(part[1]) for part in done) == sum(
                b.elements for b in entry.boxes
            ):
                continue
            for box in entry.boxes:
                yield from ((entry.name, left) for left in left_of((box.start, box.size), done))

    def _check_written(self) -> None:
        for name, gap in self._gaps():
            message = f"{name!r}{text(gap)} was not written by update {self._opened.version}"
            raise TransferError(message, phase="finish")


def _check_new(name: str, place: Range, done: Iterable[Range]) -> None:
    twice = next((part for old in done if (part := overlap(old, place))), None)
    if twice is not None:
        message = f"{name!r}{text(twice)} arrived twice in one update"
        raise TransferError(message, phase="load")


def _joined(name: str, parts: list[tuple[Range, torch.Tensor]]) -> torch.Tensor:
    """Put an adapter tensor's pieces together; TransferError when they leave a gap or lie on one another."""
    shape = tuple(
        max(s + n for s, n in axis) for axis in zip(*(zip(*place, strict=True) for place, _ in parts), strict=True)
    )
    if sum(tensor.numel() for _, tensor in parts) != prod(shape):
        message = f"the pieces of adapter tensor {name!r} do not make up a whole of shape {list(shape)}"
        raise TransferError(message, phase="finish")
    if len(parts) == 1:
        return parts[0][1]
    whole = torch.empty(shape, dtype=parts[0][1].dtype, device=parts[0][1].device)
    for (start, size), tensor in parts:
        narrowed(whole, (0,) * len(shape), start, size).copy_(tensor)
    return whole
