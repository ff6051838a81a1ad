"""What an engine wants, by the model's config alone; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain.tensors.checkpoint import Maker, along, parameters, stacked

if TYPE_CHECKING:
    from powertrain.layout import Part
    from powertrain.weights import EngineManifest


def manifest(config: Mapping[str, Any], part: Part) -> EngineManifest:
    """Return the manifest of an engine, which is one rank with every tensor whole."""
    maker, held = Maker(1, config, casts=True), {}
    for own in parameters(config, running=True):
        if own.shape not in held:
            held[own.shape] = along(own.shape, 0, [((0,), 0, own.shape[0])])
        storage, each, before = stacked(own)
        maker.add(own, held[own.shape], storage, max(own.expert, 0) * each + before)
    return maker.manifest()
