"""A model's config.json as the transformers at hand reads it, where another one has written it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.version import Version

from powertrain.errors import ConfigError

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec

MOVED: Final = ("rope_theta", "partial_rotary_factor")
"""What transformers 5 writes into `rope_parameters`, and transformers 4 looks for beside it."""
BASES: Final = ("rope_theta", "rope_local_base_freq", "global_rope_theta", "local_rope_theta")
"""Keys that hold a base of rotary embeddings, wherever they stand."""


def overrides(folder: str) -> dict[str, Any]:
    """Return what of a model's config has to be said to the installed transformers; nothing from version 5 on.

    transformers 4 passes over `rope_parameters` and takes its own default, which vLLM then writes over what the file
    says: another base, so other log-probs, and no error.
    """
    try:
        old = Version(version("transformers")).major < 5
    except PackageNotFoundError:
        return {}
    config = read(folder) if old else {}
    within = config.get("rope_parameters") or {}
    return {name: within[name] for name in MOVED if name in within and name not in config}


def unpacked(spec: EngineSpec) -> dict[str, Any]:
    """Return engine arguments under which weights stay parameters, where vLLM would choose otherwise for speed.

    On a CPU with AMX its latent attention (MLA) packs and empties `kv_b_proj`; the reference kernel leaves it.
    """
    latent = read(spec.model).get("kv_lora_rank") is not None
    return {"attention_backend": "CPU_MLA"} if latent and spec.place.device == "cpu" else {}


def check_rope(folder: str, modules: Iterable[Any]) -> None:
    """Hold a running model's rotary embeddings to the bases in its config.json; ConfigError with both numbers."""
    bases = set(_bases(read(folder)))
    for module in modules:
        found = getattr(module, "base", None)
        if bases and hasattr(module, "rotary_dim") and isinstance(found, int | float) and found not in bases:
            said = ", ".join(f"{base:g}" for base in sorted(bases))
            message = (
                f"vLLM computes rotary embeddings with base {found:g}, and the model's config.json says {said}: its "
                "transformers does not read this file. Install one of the major version that wrote it"
            )
            raise ConfigError(message)


def read(folder: str) -> Mapping[str, Any]:
    """Return a model's config.json, empty where there is none."""
    path = Path(folder) / "config.json"
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def _bases(value: Any) -> Iterator[float]:
    for name, inner in value.items() if isinstance(value, Mapping) else ():
        if name in BASES and isinstance(inner, int | float):
            yield inner
        yield from _bases(inner)
