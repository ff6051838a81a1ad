"""LoRA adapters by their versioned names: which there are, where they lie, who uses them, and what older names get."""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from powertrain.errors import ConfigError, StateError
from powertrain.options import nearest
from powertrain.tensors.lora import match, parse_adapter_name, version_of
from powertrain.weights import WeightVersion

if TYPE_CHECKING:
    from powertrain.interfaces.weights import WeightSink

REMEMBERED: Final = 4096
"""Dropped names that are still told apart from names that never were."""


@dataclass(frozen=True, slots=True)
class Held:
    """An adapter that answers. owned: its folder is ours, and goes with it."""

    name: str
    folder: str
    owned: bool


class Shelf:
    """Every version has a name, and in vLLM a number, of its own: under one number the first one's weights would stay.

    most: how many are kept; for a new one the oldest goes that no request uses. stale: what a request under a dropped
    name gets, "refuse" or "newest" (of the same base name).

    lock: requests come on the event loop and adapters on another thread; held from `find` to `use`, and from `surplus`
    to `take`, so that none is dropped that a request has just been given.
    """

    def __init__(self, most: int, stale: str) -> None:
        self._most, self._stale = most, stale
        self.lock = threading.Lock()
        self._held: dict[str, Held] = {}
        self._users: Counter[str] = Counter()
        self._gone: dict[str, None] = {}

    def names(self) -> list[str]:
        """Return the names that answer, oldest first."""
        return list(self._held)

    def find(self, name: str) -> str:
        """Return the adapter that answers a request under `name`: itself, or by `stale` the newest of its kind.

        ConfigError where there is none: the base model never answers in its place.
        """
        if name in self._held:
            return name
        if name in self._gone and self._stale == "newest":
            base = parse_adapter_name(name)[0]
            fitting = [other for other in self._held if version_of(other) and parse_adapter_name(other)[0] == base]
            if fitting:
                return max(fitting, key=lambda other: version_of(other) or WeightVersion(0, 0))
        known = ", ".join(self._held) or "none"
        if name in self._gone:
            message = (
                f"adapter {name!r} was dropped; there is: {known}. Raise max_adapters, or set stale_adapter=newest"
            )
        else:
            message = f"no adapter {name!r} is loaded{nearest(name, self._held)}; there is: {known}"
        raise ConfigError(message)

    def use(self, name: str, by: int) -> None:
        """Count the requests that use an adapter up (1) or down (-1)."""
        self._users[name] += by

    def check_new(self, name: str) -> None:
        """StateError for a name that is there already."""
        if name in self._held:
            message = f"adapter {name!r} is loaded already; every version has a name of its own"
            raise StateError(message)

    def check_room(self) -> None:
        """StateError when one more cannot be kept, since requests use all that there are."""
        idle = sum(not self._users[name] for name in self._held)
        if len(self._held) - self._most + 1 > idle:
            message = (
                f"{len(self._held)} adapters are loaded, all {self._most} places are used by requests in flight; "
                "wait for those, or raise max_adapters"
            )
            raise StateError(message)

    def surplus(self) -> list[str]:
        """Return the names to drop, oldest first: what is beyond the bound and no request uses."""
        idle = [name for name in self._held if not self._users[name]]
        return idle[: max(0, len(self._held) - self._most)]

    def put(self, held: Held) -> None:
        """Note an adapter that vLLM has."""
        self._held[held.name] = held
        self._gone.pop(held.name, None)

    def take(self, name: str) -> None:
        """Forget one that vLLM has no more, and its folder if that is ours."""
        held = self._held.pop(name)
        self._gone[name] = None
        while len(self._gone) > REMEMBERED:
            del self._gone[next(iter(self._gone))]
        if held.owned:
            shutil.rmtree(held.folder, ignore_errors=True)

    def forget(self, name: str) -> None:
        """As `take`, for one that may have gone already."""
        if name in self._held:
            self.take(name)

    def check_drop(self, name: str) -> None:
        """ConfigError for an unknown name, StateError while requests use it."""
        if name in self._gone:
            message = f"adapter {name!r} was dropped already"
            raise ConfigError(message)
        self.find(name)
        if self._users[name]:
            message = f"adapter {name!r} is in use by {self._users[name]} requests in flight; abort them or wait"
            raise StateError(message)

    def clear(self) -> None:
        """Forget all."""
        for name in list(self._held):
            self.take(name)


def check_room_made(name: str, made: bool) -> None:
    """Raise ConfigError for an adapter that comes to a vLLM without room for any."""
    if not made:
        message = f"adapter {name!r} cannot be loaded: vLLM was started without room for any; set enable_lora=true"
        raise ConfigError(message)


def check_folder(name: str, folder: str, modules: Iterable[str]) -> None:
    """Check a PEFT adapter before vLLM sees it, which passes over keys that fit no module; ConfigError says why.

    modules: names of the model's modules that have a weight.
    """
    from safetensors import safe_open

    place = Path(folder)
    missing = [f for f in ("adapter_config.json", "adapter_model.safetensors") if not (place / f).exists()]
    if missing:
        message = f"{folder} is no PEFT adapter: it lacks {' and '.join(missing)}"
        raise ConfigError(message)
    config = json.loads((place / "adapter_config.json").read_text(encoding="utf-8"))
    if config.get("modules_to_save"):
        message = f"adapter {name!r} carries whole modules (modules_to_save); send those as full weights"
        raise ConfigError(message)
    kind = str(config.get("peft_type", "LORA")).rpartition(".")[2]
    if kind != "LORA":
        message = f"adapter {name!r} is of type {kind}; this engine takes LORA"
        raise ConfigError(message)
    with safe_open(place / "adapter_model.safetensors", "np") as file:
        match(list(file.keys()), modules)


def check_targets(targets: Iterable[str], modules: Iterable[str]) -> None:
    """Refuse targets of a run's adapter that are the end of no module's name; ConfigError lists what there is."""
    modules = list(modules)
    missing = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in modules)]
    if missing:
        ends = sorted({name.rpartition(".")[2] for name in modules})
        words = " and no ".join(f"{target!r}{nearest(target, ends)}" for target in missing)
        message = f"lora.targets: the model that vLLM holds has no module {words}; it has: {', '.join(ends)}"
        raise ConfigError(message)


def modules_of(sink: WeightSink) -> list[str]:
    """Return the names of the modules that an adapter may fit, by the names of the weights."""
    ends = ".weight"
    return [entry.name.removesuffix(ends) for entry in sink.manifest() if entry.name.endswith(ends)]
