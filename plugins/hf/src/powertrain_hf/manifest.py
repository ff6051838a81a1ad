"""What an engine wants, by the model's config alone; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain.tensors.checkpoint import Maker, along, dtype_of, parameters
from powertrain.weights.boxes import FLOATS

if TYPE_CHECKING:
    from powertrain.layout import Part
    from powertrain.weights import EngineManifest


def manifest(config: Mapping[str, Any], part: Part) -> EngineManifest:
    """Return the manifest of an engine, which is one rank with every tensor whole."""
    maker, held = Maker(1, config), {}
    for own in parameters(config, stacked=True):
        if own.shape not in held:
            held[own.shape] = along(own.shape, 0, [((0,), 0, own.shape[0])])
        dtype = own.dtype or dtype_of(config)
        maker.add(own, held[own.shape], accepts=tuple(other for other in FLOATS if other != dtype))
    return maker.manifest()
