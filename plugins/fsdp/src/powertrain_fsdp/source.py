"""This rank's weights as boxes: shards where FSDP holds them, whole tensors where nothing is sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from powertrain.interfaces.weights import WeightSource
from powertrain.tensors.hf_names import in_hf_names
from powertrain.tensors.lora import PREFIX, adapter_config, disk_key
from powertrain.tensors.sink import dtype_name
from powertrain.weights import Box, Entry, Manifest

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain_fsdp.model import Built


class FsdpWeightSource(WeightSource):
    """Full weights, or the adapter alone when one is trained. Storages carry the model's own names."""

    def __init__(self, built: Built, spec: EngineSpec, changes: Callable[[], int], moves: Callable[[], int]) -> None:
        self._built, self._spec, self._changes, self._moves = built, spec, changes, moves

    def manifest(self) -> Manifest:
        """Return this rank's boxes; moves nothing. A rank whose share of a tensor is empty lists it without boxes."""
        entries = tuple(self._entry(name, tensor) for name, tensor in self._named().items())
        place, lora = self._spec.place, self._spec.lora
        if lora is None:
            own = Manifest(place.rank, place.world, entries, dict(self._built.tied))
            return in_hf_names(own, self._built.places)
        meta = {"adapter": lora.name, "adapter_config": dict(adapter_config(lora, base_model=self._spec.model))}
        return Manifest(place.rank, place.world, entries, kind="adapter", meta=meta)

    def tensors(self) -> Mapping[str, Any]:
        """Return the local tensors themselves, not copies."""
        return {name: _local(tensor) for name, tensor in self._named().items()}

    def changes(self) -> int:
        """Count steps taken and checkpoints loaded."""
        return self._changes()

    def places(self) -> int:
        """Count offloads and onloads; nothing else gives a weight other memory."""
        return self._moves()

    def fence(self) -> None:
        """Wait for the device."""
        if self._built.device.type == "cuda":
            torch.cuda.synchronize(self._built.device)

    def _named(self) -> dict[str, torch.Tensor]:
        return named_weights(self._built)

    @staticmethod
    def _entry(name: str, tensor: torch.Tensor) -> Entry:
        local = _local(tensor)
        size, start = tuple(local.shape), (0,) * tensor.dim()
        if isinstance(tensor, DTensor):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            # Shards follow torch.chunk: all of ceil(n / ranks) rows but the last ones, which may be short or empty.
            size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        boxes = (Box(tuple(start), tuple(size), name, 0, tuple(local.stride())),) if local.numel() else ()
        return Entry(name, dtype_name(tensor.dtype), tuple(tensor.shape), boxes)


def named_weights(built: Built) -> dict[str, torch.Tensor]:
    """Return what is sent and exported: parameters and buffers by the model's names, or the adapter by PEFT's."""
    if not built.lora:
        return {**built.parameters, **built.buffers}
    return {disk_key(PREFIX + name): p for name, p in built.parameters.items() if ".lora_" in name}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain
