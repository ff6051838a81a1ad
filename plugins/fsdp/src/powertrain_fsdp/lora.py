"""LoRA through PEFT, injected into the model in place."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import nn

from powertrain.errors import ConfigError

if TYPE_CHECKING:
    from powertrain.interfaces.build import LoraSpec


def inject(model: nn.Module, lora: LoraSpec, base: str) -> None:
    """Add an adapter to `model` in place and freeze everything else.

    Draws the A matrices from torch's generator, so all ranks must have seeded it alike. ConfigError names each target
    that no module ends in.
    """
    from peft import LoraConfig, inject_adapter_in_model

    modules = [name for name, _ in model.named_modules()]
    missing = [t for t in lora.targets if not any(name == t or name.endswith(f".{t}") for name in modules)]
    if missing:
        message = f"LoRA targets without a module in {type(model).__name__}: {', '.join(missing)}"
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
