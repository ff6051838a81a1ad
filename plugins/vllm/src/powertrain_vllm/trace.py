"""What a running model wants: where its own weight loaders would put each tensor of a checkpoint, found by watching.

The loaders are run on tensors that have shapes and no memory, and every copy that they ask for is noted in place of
being done: which block of which checkpoint tensor would go where in which parameter. So fused, sharded, padded,
replicated and expert layouts need no table here, of whatever model this version of vLLM has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from powertrain.errors import ConfigError
from powertrain.tensors.sink import dtype_name
from powertrain.weights import Box, Entry, Manifest
from powertrain.weights.boxes import FLOATS

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def checkpoint(folder: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return name -> (shape, dtype) of all tensors in a model's folder, from the files' heads alone."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                about = file.get_slice(name)
                found[name] = tuple(about.get_shape()), _DTYPES.get(about.get_dtype(), torch.uint8)
    if not found:
        message = f"{folder} holds no safetensors file; vLLM takes new weights by the names that stand in those"
        raise ConfigError(message)
    return found


class _Watch(TorchDispatchMode):
    """Notes copies out of the given tensors and does not do them. blocks: name -> [(source view, target view)]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._names: dict[int, str] = {}

    def source(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor without memory that stands for one of the checkpoint."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._names[tensor.untyped_storage()._cdata] = name
        self.blocks[name] = []
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            name = self._names.get(source.untyped_storage()._cdata)
            if name is not None:
                self.blocks[name].append((source, target))
                return target
            if source.is_meta and not target.is_meta:
                message = "a loader computes with a weight before it is put into place"
                raise ConfigError(message)
        elif func is torch.ops.aten._to_copy.default and args[0].untyped_storage()._cdata in self._names:
            return args[0]  # to another device or dtype: the copy that follows does both
        return func(*args, **(kwargs or {}))


def trace(model: Any, shapes: Shapes) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return name -> blocks (view of the checkpoint's tensor, view of the parameter) by the model's own loaders.

    ConfigError where they break off, since the weights do not lie there any more as they were loaded.
    """
    with torch.no_grad(), _Watch() as watch:
        given: Iterator[tuple[str, torch.Tensor]] = (
            (name, watch.source(name, shape, dtype)) for name, (shape, dtype) in shapes.items()
        )
        try:
            model.load_weights(given)
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as exc:
            message = (
                f"the model's loaders do not take its checkpoint a second time ({exc}); this version packs weights "
                "after loading in a way that is not known here, so updates cannot be taken"
            )
            raise ConfigError(message) from exc
    return watch.blocks


def running_manifest(
    model: Any,
    shapes: Shapes,
    tied: Mapping[str, str],
    *,
    rank: int,
    world: int,
    together: Callable[[Mapping[str, str]], list[Mapping[str, str]]] = lambda own: [own],
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Return this rank's manifest and its storages. ConfigError names a tensor whose way no box describes.

    together: gathers from all ranks name -> dtype of what each holds something of; each lists the others' too.
    """
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    places = {tensor.untyped_storage().data_ptr(): name for name, tensor in reversed(held.items()) if tensor.numel()}
    found, used = {}, {}
    for name, blocks in trace(model, shapes).items():
        shape = shapes[name][0]
        boxes = []
        for source, target in blocks:
            storage = places.get(target.untyped_storage().data_ptr())
            if storage is None:
                message = f"{name!r} goes into memory that is no parameter of the model (packed after it was loaded?)"
                raise ConfigError(message)
            used[storage] = held[storage].data
            boxes.append(_box(name, shape, source, target, storage, held[storage].storage_offset()))
        if boxes:
            found[name] = dtype_name(held[boxes[0].storage].dtype), tuple(dict.fromkeys(boxes))
    dtypes = {
        name: dtype
        for own in together({name: dtype for name, (dtype, _) in found.items()})
        for name, dtype in own.items()
    }
    entries = []
    for name in (name for name in shapes if name in dtypes):
        dtype, boxes = found.get(name, (dtypes[name], ()))
        accepts = tuple(other for other in FLOATS if other != dtype) if dtype in FLOATS else ()
        entries.append(Entry(name, dtype, shapes[name][0], boxes, accepts))
    known = {alias: name for alias, name in tied.items() if name in dtypes and alias not in dtypes}
    return Manifest(rank, world, tuple(entries), known), used


def _box(name: str, shape: tuple[int, ...], source: torch.Tensor, target: torch.Tensor, storage: str, base: int) -> Box:
    """Return the box of one copy; both views have the same extent, dimension by dimension, but for those of size 1."""
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    rest, start = source.storage_offset(), []
    for stride in strides:
        start.append(rest // stride if stride else 0)
        rest -= start[-1] * stride
    size, place = [1] * len(shape), dict[int, int]()
    ours = [(n, s) for n, s in zip(source.shape, source.stride(), strict=True) if n > 1]
    theirs = [(n, s) for n, s in zip(target.shape, target.stride(), strict=True) if n > 1]
    fits = [n for n, _ in ours] == [n for n, _ in theirs]
    for (n, stride), (_, step) in zip(ours, theirs, strict=False) if fits else ():
        axis = next((i for i, s in enumerate(strides) if s == stride and n <= shape[i] > 1), None)
        if axis is None:
            fits = False
            break
        size[axis], place[axis] = n, step
    if not fits:
        message = (
            f"a block {list(source.shape)} of {name!r} {list(shape)} goes into {list(target.shape)} of {storage!r} in "
            "a way that is no box; this model cannot take new weights here"
        )
        raise ConfigError(message)
    stride = tuple(place.get(axis, prod(size[axis + 1 :])) for axis in range(len(shape)))
    return Box(tuple(start), tuple(size), storage, target.storage_offset() - base, stride)
