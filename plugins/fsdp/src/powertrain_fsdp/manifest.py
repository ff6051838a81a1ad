"""What every rank will hold, by the model's config and the layout alone; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain.tensors.checkpoint import Maker, along, chunk, experts_of, parameters, stacked

if TYPE_CHECKING:
    from powertrain.layout import Part
    from powertrain.weights import EngineManifest


def manifest(config: Mapping[str, Any], part: Part) -> EngineManifest:
    """Return the manifests of all ranks: each parameter in chunks of its rows, buffers whole on every rank.

    The experts of a layer are rows of the parameters in which they are stacked, so each lies whole on one rank.
    """
    world = part.cards_per_instance
    _, most = chunk(experts_of(config), world, 0)
    maker = Maker(world, config, part.options.get("master_dtype") or "")
    held: dict[tuple[Any, ...], Any] = {}
    for own in sorted(parameters(config, running=True), key=lambda own: _buffer(own.kind)):
        storage, each, before = stacked(own)
        rank, local = divmod(own.expert, most) if own.expert >= 0 else (-1, 0)
        whole = range(world) if _buffer(own.kind) else [rank] if rank >= 0 else []
        key = own.shape, tuple(whole)
        if key not in held:
            spans = [([rank], *chunk(own.shape[0], world, rank)) for rank in range(world)]
            held[key] = along(own.shape, 0, [(whole, 0, own.shape[0])] if whole else spans)
        maker.add(own, held[key], storage, local * each + before)
    return maker.manifest()


def _buffer(kind: str) -> bool:
    return kind.endswith("e_score_correction_bias")
