"""LoRA adapters by name: PEFT's names, which module each tensor belongs to, and versioned adapter names. No torch.

On disk an adapter's tensors are `base_model.model.<module>.lora_A.weight` and `...lora_B.weight`; in memory PEFT puts
the adapter's own name before `weight`. A key that fits no module is always an error: an engine that passes it over
answers with the base model's output and nobody notices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from powertrain.errors import ConfigError, Violations
from powertrain.interfaces.build import LoraSpec
from powertrain.options import nearest
from powertrain.weights.version import WeightVersion

PREFIX: Final = "base_model.model."
"""What PEFT puts before a module's name."""
Alias = tuple[str, str]
"""(beginning of a module's name in the adapter, what the receiver has there): `("model.", "language_model.model.")`."""
_KEY: Final = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<adapter>.+))?\.weight")
_SHOWN: Final = 8


def tensor_key(module: str, side: str, *, adapter: str = "") -> str:
    """Return the name of one tensor; side: `A` or `B`. adapter: PEFT's name in memory (`default`), "" for on disk."""
    if side not in ("A", "B"):
        message = f"a LoRA pair has sides A and B, not {side!r}"
        raise ConfigError(message)
    return f"{PREFIX}{module}.lora_{side}.{adapter}{'.' if adapter else ''}weight"


def disk_key(key: str) -> str:
    """Return the PEFT-standard name on disk: the prefix there, the adapter's own name not."""
    module, side = split_key(key)
    return tensor_key(module, side)


def module_of(key: str) -> str:
    """Return the module that a tensor's key names; PEFT's prefix is cut off only where it stands."""
    return split_key(key)[0]


def split_key(key: str) -> tuple[str, str]:
    """Return (module, side) of a tensor's key in either form; ConfigError for a key that is no LoRA weight."""
    found = _KEY.fullmatch(key)
    if found is None:
        message = f"{key!r} is not the name of a LoRA weight; one looks like {tensor_key('<module>', 'A')}"
        raise ConfigError(message)
    return found["module"].removeprefix(PREFIX), found["side"]


def match(keys: Iterable[str], modules: Iterable[str], aliases: Sequence[Alias] = ()) -> dict[str, str]:
    """Return key -> the receiver's module for every key of an adapter; called by whoever loads one.

    modules: names of the receiver's modules. aliases: explicit rules for a receiver that names its root otherwise,
    tried in order on names that do not match as they are. `Violations` names every key that matches no module, that
    repeats a side of a pair, and every module with half a pair; an adapter without any weight is an error too.
    """
    known = frozenset(modules)
    found: dict[str, str] = {}
    sides: dict[str, dict[str, str]] = {}
    problems: list[str] = []
    for key in keys:
        try:
            name, side = split_key(key)
        except ConfigError as exc:
            problems.append(str(exc))
            continue
        module = _resolve(name, known, aliases)
        if module is None:
            problems.append(f"{key!r} matches no module: there is no {name!r}{nearest(name, known)}")
            continue
        earlier = sides.setdefault(module, {}).setdefault(side, key)
        if earlier != key:
            problems.append(f"{key!r} and {earlier!r} are both side {side} of {module!r}")
        found[key] = module
    problems += [
        f"{module!r} has only side {''.join(pair)} of its pair" for module, pair in sides.items() if len(pair) == 1
    ]
    if not found and not problems:
        problems.append("it has no weights")
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise Violations(
            problems[:_SHOWN] + more, heading=f"the adapter does not fit; {len(found)} of its weights match a module:"
        )
    return found


def _resolve(name: str, known: frozenset[str], aliases: Sequence[Alias]) -> str | None:
    if name in known:
        return name
    renamed = (there + name.removeprefix(here) for here, there in aliases if name.startswith(here))
    return next((candidate for candidate in renamed if candidate in known), None)


def parse_adapter_name(name: str) -> tuple[str, WeightVersion]:
    """Undo `WeightVersion.adapter_name`: `policy-v2.17` gives ("policy", 2.17). ConfigError when it is not one."""
    base, found, version = name.rpartition("-v")
    if not found or not base:
        message = f"{name!r} is not a versioned adapter name; one looks like policy-v2.17"
        raise ConfigError(message)
    return base, WeightVersion.parse(version)


def version_of(name: str) -> WeightVersion | None:
    """Return the version in a versioned adapter name, or None."""
    try:
        return parse_adapter_name(name)[1]
    except ConfigError:
        return None


def adapter_config(spec: LoraSpec, *, base_model: str = "") -> Mapping[str, Any]:
    """Return what stands in PEFT's `adapter_config.json`. base_model: name or folder of the model it belongs to."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or None,
        "r": spec.rank,
        "lora_alpha": int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha,
        "lora_dropout": spec.dropout,
        "target_modules": sorted(spec.targets),
        "modules_to_save": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
