"""LoRA through PEFT, injected into the model in place."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from powertrain.errors import ConfigError
from powertrain.options import nearest
from powertrain.tensors.hf_names import places

if TYPE_CHECKING:
    from powertrain.interfaces.build import LoraSpec


def inject(model: nn.Module, lora: LoraSpec, base: str) -> None:
    """Add an adapter to `model` in place and freeze everything else.

    Draws the A matrices from torch's generator, so all ranks must have seeded it alike. ConfigError names each target
    that no module ends in, with the nearest of the linear modules' names and all of them, and each that is a projection
    of stacked experts.
    """
    from peft import LoraConfig, inject_adapter_in_model

    _refuse_experts(model, lora.targets)
    modules = [name for name, _ in model.named_modules() if name]
    missing = [t for t in lora.targets if not any(name == t or name.endswith(f".{t}") for name in modules)]
    if missing:
        known = _linear_names(model)
        words = ", ".join(f"{target!r}{nearest(target, known)}" for target in missing)
        message = f"lora.targets: {type(model).__name__} has no module {words}; it has: {', '.join(known)}"
        raise ConfigError(message)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that is going away
            inject_adapter_in_model(config, model, adapter_name=lora.name)
    except ValueError as exc:
        message = f"lora.targets: PEFT cannot put an adapter on {', '.join(map(repr, lora.targets))}: {exc}"
        raise ConfigError(message) from exc
    dtype = next(p for name, p in model.named_parameters() if "lora_" not in name).dtype
    for name, parameter in model.named_parameters():
        adapter = ".lora_" in name
        parameter.requires_grad_(adapter)
        if adapter:
            parameter.data = parameter.data.to(dtype)


def _refuse_experts(model: nn.Module, targets: Sequence[str]) -> None:
    """An adapter goes onto modules; the experts of a layer are rows of one parameter.

    PEFT would take every target with such a last word for the experts', and put an adapter on that parameter which no
    engine knows by name.
    """
    stacked = {name: tuple(p.shape) for name, p in model.named_parameters() if p.dim() > 2}
    several = [found for found in places(model, stacked).values() if len(found) > 1]
    words = {place.name.removesuffix(".weight").rpartition(".")[2] for found in several for place in found}
    if refused := [target for target in targets if target.rpartition(".")[2] in words]:
        rest = ", ".join(name for name in _linear_names(model) if name not in words)
        message = (
            f"lora.targets: {', '.join(map(repr, refused))} are projections of experts, which {type(model).__name__} "
            f"holds stacked in one parameter, where no adapter can stand; it can on: {rest}"
        )
        raise ConfigError(message)


def _linear_names(model: nn.Module) -> list[str]:
    """Return the last words of the names of all linear modules that an adapter may stand on: not the LM head."""
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not outputs]
    return sorted({name.rpartition(".")[2] for name in linear})
