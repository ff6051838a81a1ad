"""Weights by hand: pieces for a sink, values read through a manifest's boxes, LoRA adapters and models with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powertrain.interfaces.weights import Piece
from powertrain.testing.tensors.models import checkpoint, plain_model, scratch

if TYPE_CHECKING:
    from powertrain.weights import Manifest, Update

LORA_CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": None,
    "r": 4,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "target_modules": ["down_proj", "q_proj"],
    "bias": "none",
    "inference_mode": True,
}


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names whose tensors are not bitwise equal, or that only one side has."""
    import torch

    both = one.keys() & other.keys()
    return sorted((one.keys() ^ other.keys()) | {name for name in both if not torch.equal(one[name], other[name])})


def furthest(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the greatest difference between two sets of tensors of equal names."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def read(manifest: Manifest, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of what one rank's boxes point at, by name; NaN where no box is."""
    import torch

    from powertrain.tensors.views import block_view

    found = {}
    for entry in manifest:
        whole = torch.full(entry.shape, float("nan"), dtype=getattr(torch, entry.dtype))
        for box in entry.boxes:
            place = tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))
            whole[place] = block_view(tensors[box.storage], box.offset, box.size, box.stride).detach().cpu()
        found[entry.name] = whole
    return found


def pieces(manifest: Manifest, weights: Mapping[str, Any], dtype: str = "") -> list[Piece]:
    """Return every tensor of a sink's manifest as one piece, in the sink's dtype if not in a given one.

    Tied names are found by either.
    """
    import torch

    aliases = {name: alias for alias, name in manifest.tied.items()}
    found = []
    for entry in manifest:
        value = weights[entry.name if entry.name in weights else aliases[entry.name]]
        found.append(Piece(entry.name, (0,) * value.dim(), value.to(getattr(torch, dtype or entry.dtype))))
    return found


def sliced(whole: list[Piece]) -> Iterator[Piece]:
    """Cut every piece in two along each of its dimensions in turn, and hand the parts out last first.

    The parts lie in memory that is written over as soon as the next one is asked for.
    """
    for piece in reversed(whole):
        parts = [(piece.start, piece.tensor)]
        for axis in range(piece.tensor.dim()):
            parts = [half for start, tensor in parts for half in _halves(start, tensor, axis)]
        for start, tensor in reversed(parts):
            lent = tensor.clone()
            yield Piece(piece.name, start, lent)
            lent.fill_(99)


def _halves(start: tuple[int, ...], tensor: Any, axis: int) -> list[tuple[tuple[int, ...], Any]]:
    cut = tensor.shape[axis] // 3
    moved = (*start[:axis], start[axis] + cut, *start[axis + 1 :])
    rest = tensor.narrow(axis, cut, tensor.shape[axis] - cut)
    return [(start, tensor.narrow(axis, 0, cut)), (moved, rest)] if cut else [(start, tensor)]


def iota(manifest: Manifest) -> dict[str, Any]:
    """Return tensors of a manifest's shapes whose elements are all different whole numbers, in float32."""
    import torch

    first, found = 0, {}
    for entry in manifest:
        count = int(torch.Size(entry.shape).numel())
        found[entry.name] = torch.arange(first, first + count, dtype=torch.float32).reshape(entry.shape)
        first += count
    return found


def write(sink: Any, update: Update, weights: Mapping[str, Any], dtype: str = "") -> None:
    """Write a whole update into a sink, up to and with `finish`."""
    sink.begin(update)
    sink.apply(pieces(sink.manifest(), weights, dtype))
    sink.finish()


def adapter(seed: int, folder: str) -> dict[str, Any]:
    """Return a random LoRA adapter for a tiny model: PEFT-standard key -> tensor."""
    import torch

    from powertrain.tensors.lora import tensor_key

    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, weight in checkpoint(folder).items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(LORA_CONFIG["target_modules"])):
            rank = LORA_CONFIG["r"]
            found[tensor_key(module, "A")] = torch.randn(rank, weight.shape[1], generator=generator) * 0.3
            found[tensor_key(module, "B")] = torch.randn(weight.shape[0], rank, generator=generator) * 0.3
    return found


def save_adapter(tensors: Mapping[str, Any]) -> str:
    """Write an adapter as PEFT does, into a new folder."""
    import json

    from safetensors.torch import save_file

    folder = scratch("adapter")
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(LORA_CONFIG)))
    return str(folder)


def misnamed(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapter with one pair under the name of a layer that the model does not have."""
    return {key.replace("layers.1.self_attn", "layers.7.self_attn"): value for key, value in tensors.items()}


def merged(folder: str, tensors: Mapping[str, Any], config: Mapping[str, Any] = LORA_CONFIG) -> Any:
    """Return the plain model with an adapter merged into its weights: W + B A alpha / r."""
    import copy

    import torch

    from powertrain.tensors.lora import module_of, tensor_key

    model = copy.deepcopy(plain_model(folder))
    with torch.no_grad():
        for module in {module_of(key) for key in tensors}:
            low, high = (tensors[tensor_key(module, side)].float() for side in "AB")
            model.get_parameter(f"{module}.weight").add_(high @ low * (config["lora_alpha"] / config["r"]))
    return model


def size_of(folder: str | Path) -> int:
    """Return the number of elements of a tiny model's weights."""
    return sum(tensor.numel() for tensor in checkpoint(str(folder)).values())
