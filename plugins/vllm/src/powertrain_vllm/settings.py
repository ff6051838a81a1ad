"""What vLLM is started with: the engine arguments that follow from a run, and those that its user gave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import ConfigError

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec

OWN: Final = ("max_adapters", "stale_adapter", "untested_version", "form", "url", "api_key_env")
"""Options that are this plugin's and not vLLM's."""


def engine_arguments(spec: EngineSpec, options: Mapping[str, Any], *, native_head: bool) -> dict[str, Any]:
    """Return vLLM's engine arguments by name; options: resolved, None where vLLM's default holds.

    native_head: this version has the model config's `head_dtype`. What a user gives wins over what only suits most
    runs, and never over what a run's promises rest on (model, dtype, seed, ranks).
    """
    wanted = options.get("dtype") or "auto"
    if wanted not in {"auto", spec.dtype}:
        message = (
            f"vllm?dtype={wanted}, and the run's dtype is {spec.dtype}; give the run's own key `dtype`, for both sides"
        )
        raise ConfigError(message)
    given = {name: value for name, value in options.items() if name not in OWN and value is not None}
    cuda = spec.place.device == "cuda"
    suits: dict[str, Any] = {
        "enforce_eager": not cuda,
        "disable_log_stats": True,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
    }
    if cuda:
        suits["enable_sleep_mode"] = True
    if given.get("enable_lora"):
        suits |= dict.fromkeys(("max_loras", "max_cpu_loras"), options["max_adapters"])
    fixed = {
        "model": spec.model,
        "dtype": spec.dtype,
        "seed": spec.seed % 2**31,
        "tensor_parallel_size": spec.axes.get("t", 1),
        "pipeline_parallel_size": spec.axes.get("p", 1),
        "enable_expert_parallel": spec.axes.get("e", 1) > 1,
        "hf_overrides": {"head_dtype": "float32"} if native_head and spec.head.fp32 else {},
    }
    return {**suits, **given, **fixed}
