"""The tensors of a model by its HF config alone: names, shapes and dtypes of a checkpoint, torch-free.

Known are the model types of `MODELS`. What backends share when they make a static manifest of these is here too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from powertrain.errors import ConfigError
from powertrain.weights.boxes import FLOATS, Box, Entry
from powertrain.weights.patterns import EngineManifest, Held, Pattern, Tensor

MODELS: Final = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Shapes = Iterator[tuple[str, tuple[int, ...]]]


class Parameter(NamedTuple):
    """One tensor of a checkpoint. kind: its name without the layer (`self_attn.q_proj.weight`) and the expert's number.

    layer, expert: their global numbers, -1 outside of those. dtype: "" for the model's own.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    layer: int = -1
    expert: int = -1
    dtype: str = ""


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the config.json of a model's folder; ConfigError where there is none or it is of an unknown type."""
    path = Path(folder) / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as exc:
        message = f"{path} cannot be read as a model's config: {exc}"
        raise ConfigError(message) from exc
    if config.get("model_type") not in MODELS:
        message = f"{path} is of model type {config.get('model_type')!r}; static manifests know {', '.join(MODELS)}"
        raise ConfigError(message)
    return config


def dtype_of(config: Mapping[str, Any]) -> str:
    """Return the dtype that a config names, float32 where it names none."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def parameters(config: Mapping[str, Any], *, running: bool = False) -> list[Parameter]:
    """Return all tensors in the order of the model's modules; a tied head is left out (see `tied`).

    running: with the dtypes in which transformers 5 holds them, a router with a bias in float32; see `stacked`.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    found = [Parameter(EMBEDDING, EMBEDDING, (config["vocab_size"], hidden))]
    count = experts_of(config)
    shapes = {sparse: list(_layer(config, count if sparse else 0)) for sparse in (False, True)}
    for layer in range(layers):
        for kind, shape in shapes[_sparse(config, layer, count)]:
            prefix, keep = f"model.layers.{layer}.", kind.endswith("correction_bias")
            keep |= running and kind == "mlp.gate.weight" and config["model_type"] == "deepseek_v3"
            dtype = "float32" if keep else ""
            if ".experts." not in kind:
                found.append(Parameter(prefix + kind, kind, shape, layer, dtype=dtype))
                continue
            before, _, after = kind.rpartition("experts.")
            found += [Parameter(f"{prefix}{before}experts.{e}.{after}", kind, shape, layer, e) for e in range(count)]
    found.append(Parameter("model.norm.weight", "model.norm.weight", (hidden,)))
    return found if tied(config) else [*found, Parameter(HEAD, HEAD, (config["vocab_size"], hidden))]


def stacked(own: Parameter) -> tuple[str, int, int]:
    """Return where transformers 5 holds a tensor: its storage, elements of one expert there, and those before it.

    The experts of a layer are stacked in two parameters; in one of them gate rows stand before up rows.
    """
    if own.expert < 0:
        return own.name, 0, 0
    (module, last), size = own.kind.split(".")[-2:], prod(own.shape)
    prefix = own.name.removesuffix(f"{own.expert}.{module}.{last}")
    if module == "down_proj":
        return f"{prefix}{module}", size, 0
    return f"{prefix}gate_up_proj", 2 * size, size if module == "up_proj" else 0


def tied(config: Mapping[str, Any]) -> dict[str, str]:
    """Return alias -> name of the tied head, {} where it has weights of its own."""
    return {HEAD: EMBEDDING} if config.get("tie_word_embeddings") else {}


def experts_of(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts of a layer that has any, 0 for a dense model."""
    return int(next(filter(None, map(config.get, ("n_routed_experts", "num_experts", "num_local_experts"))), 0))


def _sparse(config: Mapping[str, Any], layer: int, experts: int) -> bool:
    if not experts or layer in (config.get("mlp_only_layers") or ()):
        return False
    return bool(
        layer >= config.get("first_k_dense_replace", 0) and (layer + 1) % config.get("decoder_sparse_step", 1) == 0
    )


def _layer(config: Mapping[str, Any], experts: int) -> Shapes:
    hidden = config["hidden_size"]
    yield from _latent(config) if config.get("kv_lora_rank") else _grouped(config)
    bias = bool(config.get("mlp_bias"))
    if experts:
        inner, biased = config["moe_intermediate_size"], config["model_type"] == "deepseek_v3"
        yield from ((f"mlp.experts.{name}", shape) for name, shape in _mlp(hidden, inner))
        yield "mlp.gate.weight", (experts, hidden)
        if biased:
            yield "mlp.gate.e_score_correction_bias", (experts,)
        if shared := config.get("n_shared_experts"):
            yield from ((f"mlp.shared_experts.{name}", shape) for name, shape in _mlp(hidden, inner * shared))
    else:
        yield from ((f"mlp.{name}", shape) for name, shape in _mlp(hidden, config["intermediate_size"], bias))
    yield from ((f"{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention"))


def _mlp(hidden: int, inner: int, bias: bool = False) -> Shapes:
    for name, out, into in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        yield from _linear(f"{name}_proj", out, into, bias)


def _linear(name: str, out: int, into: int, bias: bool = False) -> Shapes:
    yield f"{name}.weight", (out, into)
    if bias:
        yield f"{name}.bias", (out,)


def head_dim(config: Mapping[str, Any]) -> int:
    """Return the size of an attention head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _grouped(config: Mapping[str, Any]) -> Shapes:
    hidden, size, heads = config["hidden_size"], head_dim(config), config["num_attention_heads"]
    bias, kind = bool(config.get("attention_bias")), config["model_type"]
    for name in ("q", "k", "v"):
        own = heads if name == "q" else config.get("num_key_value_heads") or heads
        yield from _linear(f"self_attn.{name}_proj", own * size, hidden, bias or kind == "qwen2")
    yield from _linear("self_attn.o_proj", hidden, heads * size, bias)
    if kind in {"qwen3", "qwen3_moe"}:
        yield from ((f"self_attn.{name}_norm.weight", (size,)) for name in ("q", "k"))


def _latent(config: Mapping[str, Any]) -> Shapes:
    """Multi-head latent attention: queries, keys and values through narrow projections."""
    hidden, heads, bias = config["hidden_size"], config["num_attention_heads"], bool(config.get("attention_bias"))
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    narrow, kv = config.get("q_lora_rank"), config["kv_lora_rank"]
    if narrow:
        yield from _linear("self_attn.q_a_proj", narrow, hidden, bias)
        yield "self_attn.q_a_layernorm.weight", (narrow,)
    yield from _linear(f"self_attn.q_{'b_' if narrow else ''}proj", heads * (nope + rope), narrow or hidden)
    yield from _linear("self_attn.kv_a_proj_with_mqa", kv + rope, hidden, bias)
    yield "self_attn.kv_a_layernorm.weight", (kv,)
    yield from _linear("self_attn.kv_b_proj", heads * (nope + value), kv)
    yield from _linear("self_attn.o_proj", hidden, heads * value, bias)


def chunk(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return (start, size) of a part as torch.chunk deals: all of ceil(length / parts) but the last ones."""
    step = -(-length // parts)
    start = min(length, step * part)
    return start, min(step, length - start)


def along(shape: tuple[int, ...], axis: int, spans: Iterable[tuple[Sequence[int], int, int]]) -> tuple[Held, ...]:
    """Return who holds what of a tensor that is cut along one axis: spans of (ranks, start, size), each contiguous."""
    held = []
    for ranks, at, n in spans:
        start, size = [0] * len(shape), list(shape)
        start[axis], size[axis] = at, n
        stride = tuple(prod(size[i + 1 :]) for i in range(len(size)))
        if n:
            held.append((tuple(ranks), (Box(tuple(start), tuple(size), "", 0, stride),)))
    return tuple(held)


class Maker:
    """Collects an engine's tensors. `held` that is the same object makes the same pattern, so callers keep it.

    dtype: "" for the model's own. casts: for a sink that takes floats of any dtype for floats.
    """

    def __init__(self, world: int, config: Mapping[str, Any], dtype: str = "", *, casts: bool = False) -> None:
        self._world, self._tied, self._dtype = world, tied(config), dtype or dtype_of(config)
        self._casts = FLOATS if casts else ()
        self._patterns: dict[tuple[Any, ...], Pattern] = {}
        self._tensors: list[Tensor] = []

    def add(self, own: Parameter, held: tuple[Held, ...], storage: str = "", base: int = 0) -> None:
        """Add a tensor that lies in `storage` (its own name if not given) from `base` elements on."""
        dtype = own.dtype or self._dtype
        key = dtype, own.shape, id(held)
        if key not in self._patterns:
            accepts = tuple(other for other in self._casts if other != dtype) if dtype in FLOATS else ()
            self._patterns[key] = Pattern(Entry("", dtype, own.shape, (), accepts), held)
        self._tensors.append(Tensor(own.name, self._patterns[key], storage or own.name, base))

    def manifest(self) -> EngineManifest:
        """Return what was collected."""
        return EngineManifest(self._world, tuple(self._tensors), self._tied)
