"""The small frozen records that a plugin's hooks return; heavy classes are named in them by text.

A spec is what core knows of a plugin: enough to parse and explain config strings, place ranks, check options and
tell what is missing, without importing the engine. `"module:Attribute"` texts are imported on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from powertrain.errors import ConfigError
from powertrain.options import OptionSpec

API_VERSION: Final = (1, 0)
"""Version of the interfaces between core and plugins: (major, minor). A plugin built for the same major and a minor
not newer than this works; workers compare it at the handshake."""

ROLES: Final = ("train", "infer")


class Support(Enum):
    """How far an engine supports a capability; asked for before use."""

    FULL = "full"
    """Works in every layout that the backend accepts."""
    PARTIAL = "partial"
    """Works in some layouts or versions; the capability's note says which."""
    NONE = "none"
    """Does not work; asking for it is refused before anything starts."""
    UNKNOWN = "unknown"
    """Nobody has said; treated as NONE where a guarantee depends on it."""


CAPABILITIES: Final[Mapping[str, str]] = {
    "fp32_head": "log-probs from an LM head computed in float32",
    "determinism": "same seed and input give bitwise equal results",
    "lora": "adapters under PEFT-standard names",
    "colocated": "shares cards with an engine of the other role",
    "offload": "gives its device memory back and takes it again",
    "checkpoint": "saves and loads its native state, optimizer included",
    "export": "writes HF-format weights",
    "packed": "packed sequences without padding",
    "pause_keep": "requests frozen across a weight update go on afterwards",
    "shared_storage": "weights can be shared with an engine of the other role in the same process",
    "streaming": "tokens are handed out while a request runs",
}
"""Every capability that core asks for, with its meaning. Plugins may add their own names."""


@dataclass(frozen=True, slots=True)
class AxisSpec:
    """One parallel dimension of a backend.

    name: one lower-case letter or word, as in `t4`. title: the word in messages ("tensor parallel").
    world: True when the part's number of ranks is multiplied by it (d, c, t, p), False when it lies within the
    others (e). instances: True when it counts separate engines rather than ranks of one (d of an infer backend).
    section: "" for all layers, "ffn" where it exists only in expert layers. minimum/maximum: inclusive limits.
    """

    name: str
    title: str = ""
    world: bool = True
    instances: bool = False
    section: str = ""
    minimum: int = 1
    maximum: int | None = None


STANDARD_AXES: Final[Mapping[str, AxisSpec]] = {
    "d": AxisSpec("d", "data parallel"),
    "t": AxisSpec("t", "tensor parallel"),
    "p": AxisSpec("p", "pipeline parallel"),
    "c": AxisSpec("c", "context parallel"),
    "e": AxisSpec("e", "expert parallel", world=False),
}
"""The five common axes; a backend that gives a bare letter gets these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What every plugin tells core.

    name: the entry point's name. summary: one line for lists. options: the plugin's own. requires: import names that
    it needs, shown when missing. install: the command that brings them. api: `API_VERSION` it was written for.
    status: "ready", or "planned" for what is described, so that config strings are understood, but not there yet.
    """

    name: str
    summary: str = ""
    options: tuple[OptionSpec, ...] = ()
    requires: tuple[str, ...] = ()
    install: str = ""
    api: tuple[int, int] = API_VERSION
    status: str = "ready"


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec(Spec):
    """What a backend plugin tells core; returned by the hook `powertrain_backend`.

    role: `train` or `infer`. engine: "module:Class" of a `TrainEngine` or `InferEngine`.
    axes: letters of `STANDARD_AXES` or own `AxisSpec`s, in the order in which ranks are numbered, slowest first
    (`("p", "d", "c", "t")` makes t the fastest). For an infer backend `d` counts instances.
    environment: "module:function" called as f(options, spec) before a worker
    starts, torch-free, returning the variables that the backend needs. manifest: "module:function" called as
    f(config, part), torch-free, with a model's config.json (its `dtype` the run's) and a part of a layout, returning
    the `EngineManifest` of one instance as the running engine will give it; "" where only that can tell.
    capabilities: graded support by name.
    """

    role: str
    engine: str
    axes: tuple[str | AxisSpec, ...] = ("d",)
    environment: str = ""
    manifest: str = ""
    capabilities: Mapping[str, Support] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            message = f"backend {self.name!r} has role {self.role!r}; the roles are {' and '.join(ROLES)}"
            raise ConfigError(message)

    def axis_table(self) -> dict[str, AxisSpec]:
        """Return the backend's axes by name, standard letters filled in; ConfigError for an unknown bare letter."""
        table: dict[str, AxisSpec] = {}
        for axis in self.axes:
            spec = axis if isinstance(axis, AxisSpec) else STANDARD_AXES.get(axis)
            if spec is None:
                message = f"backend {self.name!r} names axis {axis!r}, which is not standard; give an AxisSpec for it"
                raise ConfigError(message)
            if spec.name == "d" and self.role == "infer" and not isinstance(axis, AxisSpec):
                spec = AxisSpec("d", "data parallel (instances)", instances=True)
            table[spec.name] = spec
        return table


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferSpec(Spec):
    """What a transfer plugin tells core; returned by the hook `powertrain_transfer`.

    driver: "module:Class" of a `Transfer`. source/sink: "module:Class" of the endpoints that live in the worker
    processes of each side. reach: which pairs it serves, of "process" (both engines in one), "host", "device"
    (colocated on cards), "network". rank: among those that fit, the lowest is picked when the string names none.
    """

    driver: str
    source: str
    sink: str
    reach: tuple[str, ...]
    rank: int = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class LauncherSpec(Spec):
    """What a launcher plugin tells core; returned by the hook `powertrain_launcher`. launcher: "module:Class"."""

    launcher: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSpec(Spec):
    """What a recipe plugin tells core; returned by the hook `powertrain_recipe`. recipe: "module:Class"."""

    recipe: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceSpec(Spec):
    """A long-running service beside the engines (a rollout proxy, a router); hook `powertrain_service`."""

    service: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSpec(Spec):
    """A kind of card; hook `powertrain_device`. visible_variable: the environment variable that narrows the cards."""

    visible_variable: str
    probe: str
