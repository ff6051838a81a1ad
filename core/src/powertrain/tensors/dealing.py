"""How an engine deals a model's tensors over its ranks, for static manifests; torch-free.

`Dealing` is what every engine with tensor and pipeline parallel ranks does alike. `FusedDealing` adds what inference
engines do that keep query, key and value rows in one parameter, gate and up rows in one, and the experts of a layer
stacked in two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from powertrain.errors import ConfigError
from powertrain.tensors.checkpoint import (
    EMBEDDING,
    HEAD,
    Maker,
    Parameter,
    along,
    head_dim,
    parameters,
    tied,
)

if TYPE_CHECKING:
    from powertrain.layout import Part
    from powertrain.weights import EngineManifest
    from powertrain.weights.patterns import Held

ROWS: Final = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
"""Modules whose rows are dealt over the ranks of t; those of `COLUMNS` are cut across."""
COLUMNS: Final = ("o_proj", "down_proj")


class Dealing(ABC):
    """Where the tensors of a model lie in one instance; equal answers about holders are the same object.

    Ranks are numbered stage by stage; within one, every `t`-th holds the same share (see `_of`). CASTS: arriving floats
    of another dtype are cast.
    """

    CASTS: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any], part: Part) -> None:
        self._config, self._label, self._world = config, part.label, part.cards_per_instance
        self._tp, self._pp = part.axes.get("t", 1), part.axes.get("p", 1)
        self._inner = self._world // self._pp
        self._held: dict[tuple[Any, ...], tuple[Held, ...]] = {}

    @abstractmethod
    def place(self, own: Parameter) -> tuple[tuple[Held, ...], str, int]:
        """Return who holds what of a tensor, its storage, and the first element there."""

    @abstractmethod
    def _rows_of_vocabulary(self, rows: int) -> int:
        """Return the rows of the padded vocabulary on each rank of t."""

    def manifest(self, dtype: str = "") -> EngineManifest:
        """Return the manifests of all ranks; ConfigError for what cannot be dealt. dtype: "" for the model's own."""
        maker = Maker(self._world, self._config, dtype, casts=self.CASTS)
        for own in parameters(self._config):
            maker.add(own, *self.place(own))
        return maker.manifest()

    def _outside(self, own: Parameter) -> tuple[Held, ...]:
        """Embedding and head are dealt in rows of the padded vocabulary; a tied embedding is on the last stage too."""
        last, rows = self._pp - 1, own.shape[0]
        if own.kind not in {EMBEDDING, HEAD}:
            return self._whole(own, [last])
        per = self._rows_of_vocabulary(rows)
        on = [last] if own.kind == HEAD else sorted({0, last} if tied(self._config) else {0})
        cuts = [(t, min(rows, t * per), min(rows, (t + 1) * per)) for t in range(self._tp)]
        return self._along(own, 0, on, [(self._of(t), at, end - at) for t, at, end in cuts])

    def _even_cut(self, own: Parameter, axis: int, on: Sequence[int], what: str) -> tuple[Held, ...]:
        per = self._even(own.shape[axis], f"{what} of {own.name}")
        return self._along(own, axis, on, [(self._of(t), t * per, per) for t in range(self._tp)])

    def _of(self, t: int) -> Sequence[int]:
        """Return the ranks of a stage, counted from its first, that are rank `t` of their tensor-parallel group."""
        return range(t, self._inner, self._tp)

    def _whole(self, own: Parameter, on: Sequence[int]) -> tuple[Held, ...]:
        return self._along(own, 0, on, [(range(self._inner), 0, own.shape[0])])

    def _along(
        self, own: Parameter, axis: int, on: Sequence[int], spans: Iterable[tuple[Sequence[int], int, int]]
    ) -> tuple[Held, ...]:
        """Return who holds the spans of (ranks of a stage, start, size) on each of the stages `on`."""
        spans = [(tuple(ranks), at, n) for ranks, at, n in spans]
        key = own.shape, axis, tuple(on), tuple(spans)
        if key not in self._held:
            every = [([stage * self._inner + rank for stage in on for rank in ranks], at, n) for ranks, at, n in spans]
            self._held[key] = along(own.shape, axis, every)
        return self._held[key]

    def _even(self, count: int, what: str, parts: int = 0) -> int:
        parts = parts or self._tp
        if count % parts:
            message = f"part {self._label!r}: {count} {what} cannot be dealt evenly over {parts}"
            raise ConfigError(message)
        return count // parts


class FusedDealing(Dealing):
    """Query, key and value rows of a rank stand one behind the other in `qkv_proj`, and key heads are replicated where
    there are fewer than ranks; gate and up in `gate_up_proj`; experts in `w13_weight` and `w2_weight`. The vocabulary
    is padded to a multiple of 64.

    LATENT: name of the fused projection of latent attention.
    """

    CASTS = True
    LATENT: ClassVar[str]
    VOCABULARY: ClassVar[int] = 64

    def __init__(self, config: Mapping[str, Any], part: Part) -> None:
        super().__init__(config, part)
        self._ep = part.axes.get("e", 1)
        counts = self.stages(config["num_hidden_layers"], self._pp)
        self._stage = [stage for stage, count in enumerate(counts) for _ in range(count)]

    @classmethod
    def of(cls, config: Mapping[str, Any], part: Part) -> EngineManifest:
        """Return the manifests of one instance's ranks; ConfigError for what cannot be dealt, or is quantised."""
        if part.options.get("quantization") or config.get("quantization_config"):
            message = f"part {part.label!r} quantises its weights, which a static manifest does not know"
            raise ConfigError(message)
        dtype = part.options.get("dtype") or "auto"
        return cls(config, part).manifest("" if dtype == "auto" else dtype)

    @staticmethod
    @abstractmethod
    def stages(layers: int, count: int) -> list[int]:
        """Return the number of layers of each pipeline stage."""

    @abstractmethod
    def _group(self, expert: int) -> tuple[int, int, int]:
        """Return which group of ranks holds an expert, its place among that group's, and how many ranks cut it."""

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
            held = self._even_cut(own, 0, [stage], "rows") if module == "q_proj" else self._replicas(own, stage)
            return held, f"{prefix}qkv_proj.{last}", before * head_dim(self._config) * row
        if module in {"gate_proj", "up_proj"}:
            base = own.shape[0] // self._tp * row if module == "up_proj" else 0
            return self._even_cut(own, 0, [stage], "rows"), f"{prefix}gate_up_proj.{last}", base
        if module in {"q_a_proj", "kv_a_proj_with_mqa"} and (narrow := self._config.get("q_lora_rank")):
            base = 0 if module == "q_a_proj" else narrow * row
            return self._whole(own, [stage]), f"{prefix}{self.LATENT}.{last}", base
        if module in ROWS:
            return self._even_cut(own, 0, [stage], "rows"), own.name, 0
        if module in COLUMNS and last == "weight":
            return self._even_cut(own, 1, [stage], "columns"), own.name, 0
        return self._whole(own, [stage]), own.name, 0

    def _rows_of_vocabulary(self, rows: int) -> int:
        padded = -(-rows // self.VOCABULARY) * self.VOCABULARY
        return self._even(padded, "rows of the padded vocabulary")

    def _expert(self, own: Parameter, stage: int, module: str, prefix: str) -> tuple[tuple[Held, ...], str, int]:
        """Experts are stacked in the order of their numbers, gate before up."""
        first, local, cut = self._group(own.expert)
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
