"""What every rank will hold, by the model's config and the layout alone; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain.tensors.checkpoint import Maker, along, chunk, parameters

if TYPE_CHECKING:
    from powertrain.layout import Part
    from powertrain.weights import EngineManifest


def manifest(config: Mapping[str, Any], part: Part) -> EngineManifest:
    """Return the manifests of all ranks: each parameter in chunks of its rows, buffers whole on every rank."""
    world = part.cards_per_instance
    maker = Maker(world, config, part.options.get("master_dtype") or "")
    held: dict[tuple[bool, tuple[int, ...]], Any] = {}
    for own in sorted(parameters(config, stacked=True), key=lambda own: _buffer(own.kind)):
        key = _buffer(own.kind), own.shape
        if key not in held:
            spans = [([rank], *chunk(own.shape[0], world, rank)) for rank in range(world)]
            held[key] = along(own.shape, 0, [(range(world), 0, own.shape[0])] if key[0] else spans)
        maker.add(own, held[key])
    return maker.manifest()


def _buffer(kind: str) -> bool:
    return kind.endswith("e_score_correction_bias")
