"""What every rank of an engine will hold, by the model's config and the layout alone; torch-free.

As vLLM lays models out: query, key and value rows of a rank stand one behind the other in `qkv_proj`, key heads are
replicated where there are fewer than ranks; gate and up in `gate_up_proj`; the experts of a layer are stacked in
`w13_weight` and `w2_weight`; the vocabulary is padded to a multiple of 64. Layers left over when they are dealt over
the pipeline stages go to those before the last. Tests hold it to engines of vLLM 0.32 that run; formats that reorder
weights after loading are not known here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.tensors.checkpoint import experts_of
from powertrain.tensors.dealing import FusedDealing

if TYPE_CHECKING:
    from powertrain.layout import Part
    from powertrain.tensors.checkpoint import Parameter
    from powertrain.weights import EngineManifest
    from powertrain.weights.patterns import Held


def manifest(config: Mapping[str, Any], part: Part) -> EngineManifest:
    """Return the manifests of one instance's ranks; ConfigError for what cannot be dealt over them, or is quantised."""
    return Ranks.of(config, part)


class Ranks(FusedDealing):
    """What vLLM does its own way: stages before the last have the layers left over, and experts are dealt whole over
    all ranks of t, or each is cut by all of them.
    """

    LATENT = "fused_qkv_a_proj"

    def __init__(self, config: Mapping[str, Any], part: Part) -> None:
        super().__init__(config, part)
        if self._ep not in {1, self._tp}:
            what = f"over all {self._tp} ranks of t or over none, not over e{self._ep}"
            message = f"part {part.label!r}: experts are spread {what}"
            raise ConfigError(message)

    @staticmethod
    def stages(layers: int, count: int) -> list[int]:
        """Return the number of layers of each pipeline stage."""
        each = [layers // count] * count
        for i in range(2, layers % count + 2):
            each[-i] += 1
        return each

    def _expert(self, own: Parameter, stage: int, module: str, prefix: str) -> tuple[tuple[Held, ...], str, int]:
        return super()._expert(own, stage, module, f"{prefix}routed_experts.")

    def _group(self, expert: int) -> tuple[int, int, int]:
        count = experts_of(self._config)
        cut, bounds = (self._tp, [0, count]) if self._ep == 1 else (1, [0])
        for rank in range(self._ep if self._ep > 1 else 0):
            bounds.append(bounds[-1] + count // self._ep + (rank < count % self._ep))
        first = bisect_right(bounds, expert) - 1
        return first, expert - bounds[first], cut
