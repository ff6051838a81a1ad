"""LoRA through PEFT, injected into the model in place."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import nn

from powertrain.errors import ConfigError
from powertrain.options import nearest

if TYPE_CHECKING:
    from powertrain.interfaces.build import LoraSpec


def inject(model: nn.Module, lora: LoraSpec, base: str) -> None:
    """Add an adapter to `model` in place and freeze everything else.

    Draws the A matrices from torch's generator, so all ranks must have seeded it alike. ConfigError names each target
    that no module ends in, with the nearest of the linear modules' names and all of them.
    """
    from peft import LoraConfig, inject_adapter_in_model

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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that is going away
        inject_adapter_in_model(config, model, adapter_name=lora.name)
    dtype = next(p for name, p in model.named_parameters() if "lora_" not in name).dtype
    for name, parameter in model.named_parameters():
        adapter = ".lora_" in name
        parameter.requires_grad_(adapter)
        if adapter:
            parameter.data = parameter.data.to(dtype)


def _linear_names(model: nn.Module) -> list[str]:
    """Return the last words of the names of all linear modules that an adapter may stand on: not the LM head."""
    outputs = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not outputs]
    return sorted({name.rpartition(".")[2] for name in linear})
