"""Where the tensors of an HF checkpoint lie in a transformers model, which holds several of them in one parameter.

Engines tell their weights by the names that `save_pretrained` writes, since these are the ones that every other engine
knows. Transformers 5 keeps the experts of a layer stacked, for one, and takes them apart when it saves. Its own
conversion is run here on tensors without memory, and what it cuts out of each is a box.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from powertrain.weights import Box, Entry, Manifest
from powertrain.weights.ranges import overlap

if TYPE_CHECKING:
    from collections.abc import Iterator

APART: Final = "transformers:"
"""What the name of a tensor begins with that no checkpoint has as it is held."""


class Place(NamedTuple):
    """A tensor of the checkpoint within one of the model's own.

    name, shape: in the checkpoint. start: the index in the model's tensor at which it begins. axes: for each of its
    dimensions the one of the model's tensor along which it runs, so a transposed one has them in another order.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    axes: tuple[int, ...]

    def box(self, own: Box) -> Box | None:
        """Return what a box of the model's tensor holds of this one, None where that is nothing."""
        extent = [1] * len(self.start)
        for axis, n in zip(self.axes, self.shape, strict=True):
            extent[axis] = n
        common = overlap((self.start, tuple(extent)), (own.start, own.size))
        if common is None:
            return None
        start, size = common
        return Box(
            tuple(start[axis] - self.start[axis] for axis in self.axes),
            tuple(size[axis] for axis in self.axes),
            own.storage,
            own.place(start),
            tuple(own.stride[axis] for axis in self.axes),
        )


Places = Mapping[str, "tuple[Place, ...]"]
"""Name of a tensor in the model -> what of the checkpoint lies in it."""


class _Views(TorchFunctionMode):
    """Leaves views what they are; transformers makes them contiguous for its files."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def places(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Places:
    """Return where the checkpoint's tensors lie in the model's own; shapes: of those, whole, by their names.

    A tensor whose values `save_pretrained` works out anew, so that no box holds them, is left out.
    """
    from transformers.core_model_loading import revert_weight_conversion

    own = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    with _Views():
        saved = revert_weight_conversion(model, dict(own))
    names = {id(tensor): name for name, tensor in own.items()}
    found: dict[str, list[Place]] = {name: [] for name in own}
    for name, tensor in saved.items():
        owner = names.get(id(tensor if id(tensor) in names else tensor._base))
        place = _placed(name, tensor, own[owner]) if owner else None
        if owner and place:
            found[owner].append(place)
    return {name: tuple(made) for name, made in found.items() if _whole(made, shapes[name])}


def _placed(name: str, part: torch.Tensor, own: torch.Tensor) -> Place | None:
    """Return the place of a view, None for one that is no block of its tensor."""
    start, rest = [], part.storage_offset()
    for stride in own.stride():
        at, rest = divmod(rest, max(stride, 1))
        start.append(at)
    left, axes = list(range(own.dim())), []
    for n, stride in zip(part.shape, part.stride(), strict=True):
        fits = (a for a in left if own.stride(a) == stride and start[a] + n <= own.shape[a])
        axis = next(fits, None)
        if axis is None:
            return None
        left.remove(axis)
        axes.append(axis)
    return Place(name, tuple(part.shape), tuple(start), tuple(axes))


def _whole(made: Iterable[Place], shape: tuple[int, ...]) -> bool:
    return sum(torch.Size(place.shape).numel() for place in made) == torch.Size(shape).numel()


def in_hf_names(own: Manifest, known: Places) -> Manifest:
    """Return a rank's manifest by the checkpoint's names; own: the same by the model's. Storages keep their names.

    A tensor that has no place in the checkpoint is called `transformers:` and its name in the model: engines that hold
    the model in transformers pass it on as it is, and no other one takes it for a checkpoint's.
    """
    shapes = {entry.name: entry.shape for entry in own}
    tied = {
        alias.name: name.name
        for mine, other in own.tied.items()
        for alias, name in zip(_of(known, mine, shapes[other]), _of(known, other, shapes[other]), strict=True)
    }
    entries = (made for entry in own for made in _entries(entry, _of(known, entry.name, entry.shape)))
    return replace(own, entries=tuple(entries), tied=tied)


def _of(known: Places, name: str, shape: Sequence[int]) -> tuple[Place, ...]:
    apart = Place(f"{APART}{name}", tuple(shape), (0,) * len(shape), tuple(range(len(shape))))
    return known.get(name) or (apart,)


def _entries(own: Entry, found: Iterable[Place]) -> Iterator[Entry]:
    for place in found:
        boxes = tuple(box for one in own.boxes if (box := place.box(one)))
        yield replace(own, name=place.name, shape=place.shape, boxes=boxes)
