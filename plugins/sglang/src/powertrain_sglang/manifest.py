"""What every rank of an engine will hold, by the model's config and the layout alone; torch-free.

As SGLang lays models out: query, key and value rows of a rank stand one behind the other in `qkv_proj`, key heads are
replicated where there are fewer than ranks; gate and up in `gate_up_proj`; the experts of a layer are stacked in
`w13_weight` and `w2_weight`, dealt over e groups of t / e ranks that cut each of them; the vocabulary is padded to a
multiple of 64. Layers left over when they are dealt over the pipeline stages go to the last ones. Not held to a
running engine yet, since that is not there; shared experts that are fused with the routed ones, and formats that
reorder weights after loading, are not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.tensors.checkpoint import experts_of
from powertrain.tensors.dealing import FusedDealing

if TYPE_CHECKING:
    from powertrain.layout import Part
    from powertrain.weights import EngineManifest


def manifest(config: Mapping[str, Any], part: Part) -> EngineManifest:
    """Return the manifests of one instance's ranks; ConfigError for what cannot be dealt over them, or is quantised."""
    return Ranks.of(config, part)


class Ranks(FusedDealing):
    """What SGLang does its own way: the last stages have the layers left over, groups of ranks share the experts."""

    LATENT = "fused_qkv_a_proj_with_mqa"

    def __init__(self, config: Mapping[str, Any], part: Part) -> None:
        super().__init__(config, part)
        if self._tp % self._ep:
            message = f"part {part.label!r}: {self._tp} ranks of t cannot be grouped by e{self._ep}"
            raise ConfigError(message)

    @staticmethod
    def stages(layers: int, count: int) -> list[int]:
        """Return the number of layers of each pipeline stage."""
        return [layers // count + (stage >= count - layers % count) for stage in range(count)]

    def _group(self, expert: int) -> tuple[int, int, int]:
        each = self._even(experts_of(self._config), "experts", self._ep)
        return (*divmod(expert, each), self._tp // self._ep)
