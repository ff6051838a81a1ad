"""What every rank of an engine will hold, by the model's config and the layout alone; torch-free.

As vLLM lays models out: query, key and value rows of a rank stand one behind the other in `qkv_proj`, key heads are
replicated where there are fewer than ranks; gate and up in `gate_up_proj`; the experts of a layer are stacked in
`w13_weight` and `w2_weight`; the vocabulary is padded to a multiple of 64. Layers left over when they are dealt over
the pipeline stages go to those before the last. Not held to a running engine yet, since that is not there; formats
that reorder weights after loading are not known here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import ConfigError
from powertrain.tensors.checkpoint import (
    EMBEDDING,
    HEAD,
    Maker,
    Parameter,
    along,
    experts_of,
    head_dim,
    parameters,
    tied,
)

if TYPE_CHECKING:
    from powertrain.layout import Part
    from powertrain.weights import EngineManifest
    from powertrain.weights.patterns import Held

VOCABULARY: Final = 64
"""The vocabulary is padded to a multiple of it."""
LATENT: Final = "fused_qkv_a_proj"
"""The fused projection of latent attention."""
ROWS: Final = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
"""Modules whose rows are dealt over the ranks of t; those of `COLUMNS` are cut across."""
COLUMNS: Final = ("o_proj", "down_proj")


def manifest(config: Mapping[str, Any], part: Part) -> EngineManifest:
    """Return the manifests of one instance's ranks; ConfigError for what cannot be dealt over them, or is quantised."""
    if part.options.get("quantization") or config.get("quantization_config"):
        message = f"part {part.label!r} quantises its weights, which a static manifest does not know"
        raise ConfigError(message)
    dtype = part.options.get("dtype") or "auto"
    ranks, maker = Ranks(config, part), Maker(part.cards_per_instance, config, "" if dtype == "auto" else dtype)
    for own in parameters(config):
        maker.add(own, *ranks.place(own))
    return maker.manifest()


def stages(layers: int, count: int) -> list[int]:
    """Return the number of layers of each pipeline stage."""
    each = [layers // count] * count
    for i in range(2, layers % count + 2):
        each[-i] += 1
    return each


class Ranks:
    """Where the tensors of a model lie in one instance; equal answers about holders are the same object."""

    def __init__(self, config: Mapping[str, Any], part: Part) -> None:
        self._config, self._label = config, part.label
        self._tp, self._pp = part.axes.get("t", 1), part.axes.get("p", 1)
        self._ep = part.axes.get("e", 1)
        if self._ep not in {1, self._tp}:
            what = f"over all {self._tp} ranks of t or over none, not over e{self._ep}"
            message = f"part {part.label!r}: experts are spread {what}"
            raise ConfigError(message)
        counts = stages(config["num_hidden_layers"], self._pp)
        self._stage = [stage for stage, count in enumerate(counts) for _ in range(count)]
        self._held: dict[tuple[Any, ...], tuple[Held, ...]] = {}

    def place(self, own: Parameter) -> tuple[tuple[Held, ...], str, int]:
        """Return who holds what of a tensor, its storage, and the first element there."""
        if own.layer < 0:
            return self._outside(own), own.name, 0
        stage, (module, last) = self._stage[own.layer], own.kind.split(".")[-2:]
        row, prefix = prod(own.shape[1:]), own.name.removesuffix(f"{module}.{last}")
        if own.expert >= 0:
            return self._expert(own, stage, module, prefix.removesuffix(f"{own.expert}."))
        if module in {"q_proj", "k_proj", "v_proj"} and not self._config.get("kv_lora_rank"):
            queries = self._even(self._config["num_attention_heads"], "attention heads")
            before = {"q_proj": 0, "k_proj": queries, "v_proj": queries + self._keys()[0]}[module]
            held = self._rows(own, stage) if module == "q_proj" else self._replicas(own, stage)
            return held, f"{prefix}qkv_proj.{last}", before * head_dim(self._config) * row
        if module in {"gate_proj", "up_proj"}:
            base = own.shape[0] // self._tp * row if module == "up_proj" else 0
            return self._rows(own, stage), f"{prefix}gate_up_proj.{last}", base
        if module in {"q_a_proj", "kv_a_proj_with_mqa"} and (narrow := self._config.get("q_lora_rank")):
            base = 0 if module == "q_a_proj" else narrow * row
            return self._whole(own, [stage]), f"{prefix}{LATENT}.{last}", base
        if module in ROWS:
            return self._rows(own, stage), own.name, 0
        if module in COLUMNS and last == "weight":
            return self._columns(own, stage), own.name, 0
        return self._whole(own, [stage]), own.name, 0

    def _outside(self, own: Parameter) -> tuple[Held, ...]:
        """Embedding and head are dealt in rows of the padded vocabulary; a tied embedding is on the last stage too."""
        last = self._pp - 1
        if own.kind not in {EMBEDDING, HEAD}:
            return self._whole(own, [last])
        padded = -(-own.shape[0] // VOCABULARY) * VOCABULARY
        per = self._even(padded, "rows of the padded vocabulary")
        on = [last] if own.kind == HEAD else sorted({0, last} if tied(self._config) else {0})
        cuts = [(t, min(own.shape[0], t * per), min(own.shape[0], (t + 1) * per)) for t in range(self._tp)]
        return self._along(own, 0, on, [([t], at, end - at) for t, at, end in cuts])

    def _expert(self, own: Parameter, stage: int, module: str, prefix: str) -> tuple[tuple[Held, ...], str, int]:
        """Experts are stacked in the order of their numbers, gate before up."""
        count = experts_of(self._config)
        cut, bounds = (self._tp, [0, count]) if self._ep == 1 else (1, [0])
        for rank in range(self._ep if self._ep > 1 else 0):
            bounds.append(bounds[-1] + count // self._ep + (rank < count % self._ep))
        first = bisect_right(bounds, own.expert) - 1
        local = own.expert - bounds[first]
        inner = self._even(self._config["moe_intermediate_size"], "rows of an expert", cut)
        down, hidden = module == "down_proj", self._config["hidden_size"]
        key = own.shape, down, stage, first
        if key not in self._held:
            spans = [([first * cut + i], i * inner, inner) for i in range(cut)]
            self._held[key] = self._along(own, int(down), [stage], spans)
        base = local * (1 if down else 2) * inner * hidden + (inner * hidden if module == "up_proj" else 0)
        return self._held[key], f"{prefix}{'w2' if down else 'w13'}_weight", base

    def _keys(self) -> tuple[int, int]:
        """Return the key heads of each rank, and how many ranks hold the same ones."""
        heads = self._config.get("num_key_value_heads") or self._config["num_attention_heads"]
        if heads < self._tp:
            return 1, self._even(self._tp, "ranks of t, for so many key heads,", heads)
        return self._even(heads, "key heads"), 1

    def _replicas(self, own: Parameter, stage: int) -> tuple[Held, ...]:
        (heads, same), size = self._keys(), head_dim(self._config)
        groups = range(self._tp // same)
        spans = [(range(g * same, (g + 1) * same), g * heads * size, heads * size) for g in groups]
        return self._along(own, 0, [stage], spans)

    def _rows(self, own: Parameter, stage: int) -> tuple[Held, ...]:
        per = self._even(own.shape[0], f"rows of {own.name}")
        return self._along(own, 0, [stage], [([t], t * per, per) for t in range(self._tp)])

    def _columns(self, own: Parameter, stage: int) -> tuple[Held, ...]:
        per = self._even(own.shape[1], f"columns of {own.name}")
        return self._along(own, 1, [stage], [([t], t * per, per) for t in range(self._tp)])

    def _whole(self, own: Parameter, on: Sequence[int]) -> tuple[Held, ...]:
        return self._along(own, 0, on, [(range(self._tp), 0, own.shape[0])])

    def _along(
        self, own: Parameter, axis: int, on: Sequence[int], spans: Sequence[tuple[Sequence[int], int, int]]
    ) -> tuple[Held, ...]:
        """Return who holds the spans of (ranks of t, start, size) on each of the stages `on`; ranks are p * t."""
        key = own.shape, axis, tuple(on), tuple((tuple(ranks), at, n) for ranks, at, n in spans)
        if key not in self._held:
            every = [([stage * self._tp + t for stage in on for t in ranks], at, n) for ranks, at, n in spans]
            self._held[key] = along(own.shape, axis, every)
        return self._held[key]

    def _even(self, count: int, what: str, parts: int = 0) -> int:
        parts = parts or self._tp
        if count % parts:
            message = f"part {self._label!r}: {count} {what} cannot be dealt evenly over {parts}"
            raise ConfigError(message)
        return count // parts
