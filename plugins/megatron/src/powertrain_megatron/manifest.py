"""What every rank of an engine will hold, by the model's config and the layout alone; torch-free.

As megatron-core lays models out with Transformer Engine's modules: `linear_qkv` holds, group by group, the query heads
of a key head, that and its value head; `linear_fc1` a rank's gate rows and then its up rows; experts are grouped, each
with a weight of its own, dealt over e; norms lie in the linear that follows them. Layers are numbered from 0 in each
pipeline stage and virtual stage. A layout whose stages differ has one layer more in the first ones. The vocabulary is
padded to a multiple of 128 * t. Not held to a running engine yet, since that is not there.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final

from powertrain.tensors.checkpoint import EMBEDDING, HEAD, Parameter, experts_of, head_dim, parameters
from powertrain.tensors.dealing import COLUMNS, ROWS, Dealing
from powertrain.weights.boxes import Box

if TYPE_CHECKING:
    from powertrain.layout import Part
    from powertrain.weights import EngineManifest
    from powertrain.weights.patterns import Held

VOCABULARY: Final = 128
"""The vocabulary is padded to a multiple of it and of t."""
ATTENTION: Final = {
    "o_proj": "linear_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "q_proj": "linear_q_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
}
"""Module of HF's attention -> of Megatron's; fused ones and norms aside."""
OUTSIDE: Final = {
    EMBEDDING: "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    HEAD: "output_layer.weight",
}


def manifest(config: Mapping[str, Any], part: Part) -> EngineManifest:
    """Return the manifests of all ranks; ConfigError for what cannot be dealt over them."""
    return Ranks(config, part).manifest()


class Ranks(Dealing):
    """Where the tensors of a model lie."""

    def __init__(self, config: Mapping[str, Any], part: Part) -> None:
        super().__init__(config, part)
        self._ep, self._etp = (part.expert.ep, part.expert.etp) if part.expert else (1, 1)
        self._homes = self._deal(config["num_hidden_layers"], int(part.options.get("vpp") or 1))
        self._sparse = {own.layer for own in parameters(config) if own.kind == "mlp.gate.weight"}

    def _deal(self, layers: int, chunks: int) -> list[tuple[int, str]]:
        """Return stage and name prefix of each layer; virtual stages take turns over the stages."""
        if chunks > 1:
            self._even(layers, "layers", self._pp * chunks)
        homes = []
        for turn in range(chunks):
            for stage in range(self._pp):
                count = layers // (self._pp * chunks) + (chunks == 1 and stage < layers % self._pp)
                prefix = f"chunk{turn}." if chunks > 1 else ""
                homes += [(stage, f"{prefix}decoder.layers.{i}.") for i in range(count)]
        return homes

    def place(self, own: Parameter) -> tuple[tuple[Held, ...], str, int]:
        """Return who holds what of a tensor, its storage, and the first element there."""
        if own.layer < 0:
            return self._outside(own), OUTSIDE[own.kind], 0
        stage, prefix = self._homes[own.layer]
        block, module, last = ("", *own.kind.split("."))[-3:]
        if own.expert >= 0:
            return self._expert(own, stage, module, prefix)
        if module.endswith("layernorm"):
            return self._whole(own, [stage]), prefix + self._norm(module, own.layer), 0
        if module == "gate":
            name = {"weight": "mlp.router.weight"}.get(last, "mlp.router.expert_bias")
            return self._whole(own, [stage]), prefix + name, 0
        if block in {"mlp", "shared_experts"}:
            name = f"{prefix}mlp.{'shared_experts.' if block != 'mlp' else ''}"
            name += f"linear_{'fc2' if module == 'down_proj' else 'fc1'}.{last}"
            base = own.shape[0] // self._tp * prod(own.shape[1:]) if module == "up_proj" else 0
            return self._cut(own, stage, module, last), name, base
        if module in {"q_proj", "k_proj", "v_proj"} and not self._config.get("kv_lora_rank"):
            return self._grouped(own, stage, module), f"{prefix}self_attention.linear_qkv.{last}", 0
        return self._cut(own, stage, module, last), f"{prefix}self_attention.{ATTENTION[module]}.{last}", 0

    def _norm(self, module: str, layer: int) -> str:
        """Return where a norm lies: in the linear behind it, where there is one."""
        latent = bool(self._config.get("kv_lora_rank"))
        first = "input_layernorm.weight" if latent else "self_attention.linear_qkv.layer_norm_weight"
        second = "pre_mlp_layernorm.weight" if layer in self._sparse else "mlp.linear_fc1.layer_norm_weight"
        return {
            "input_layernorm": first,
            "post_attention_layernorm": second,
            "q_a_layernorm": "self_attention.linear_q_up_proj.layer_norm_weight",
            "kv_a_layernorm": "self_attention.linear_kv_up_proj.layer_norm_weight",
        }[module]

    def _rows_of_vocabulary(self, rows: int) -> int:
        return -(-rows // (VOCABULARY * self._tp)) * VOCABULARY

    def _expert(self, own: Parameter, stage: int, module: str, prefix: str) -> tuple[tuple[Held, ...], str, int]:
        """Ranks of a stage are numbered anew for experts: etp the fastest, then e, then copies."""
        first, local = divmod(own.expert, self._even(experts_of(self._config), "experts", self._ep))
        down = module == "down_proj"
        inner = self._even(self._config["moe_intermediate_size"], "rows of an expert", self._etp)
        key = own.shape, down, stage, first
        if key not in self._held:
            firsts, step = range(first * self._etp, (first + 1) * self._etp), self._ep * self._etp
            spans = [(range(at, self._inner, step), i * inner, inner) for i, at in enumerate(firsts)]
            self._held[key] = self._along(own, int(down), [stage], spans)
        base = inner * self._config["hidden_size"] if module == "up_proj" else 0
        name = f"{prefix}mlp.experts.linear_fc{2 if down else 1}.weight{local}"
        return self._held[key], name, base

    def _grouped(self, own: Parameter, stage: int, module: str) -> tuple[Held, ...]:
        """Return the boxes of query, key or value rows, one for each group on a rank."""
        heads, size = self._config["num_attention_heads"], head_dim(self._config)
        groups = self._config.get("num_key_value_heads") or heads
        each, per = self._even(groups, "key heads"), heads // groups
        key = own.shape, module, stage
        if key not in self._held:
            row, rest = prod(own.shape[1:]), own.shape[1:]
            first, count = {"q_proj": (0, per), "k_proj": (per, 1), "v_proj": (per + 1, 1)}[module]
            stride = (row, 1) if rest else (1,)
            held = []
            for t in range(self._tp):
                boxes = []
                for local in range(each):
                    start = ((t * each + local) * count * size, *(0 for _ in rest))
                    offset = (local * (per + 2) + first) * size * row
                    boxes.append(Box(start, (count * size, *rest), "", offset, stride))
                held.append((tuple(stage * self._inner + rank for rank in self._of(t)), tuple(boxes)))
            self._held[key] = tuple(held)
        return self._held[key]

    def _cut(self, own: Parameter, stage: int, module: str, last: str) -> tuple[Held, ...]:
        axis = 0 if module in ROWS else 1 if module in COLUMNS and last == "weight" else None
        if axis is None:
            return self._whole(own, [stage])
        return self._even_cut(own, axis, [stage], "rows or columns")
