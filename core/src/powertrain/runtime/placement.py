"""Where every rank of a layout goes, and in which environment: made from the layout, before anything starts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from powertrain.devices import VISIBLE_VARIABLE, count_cards, device_variables, require_cards, visible_cards
from powertrain.env import build_environment, determinism_variables, rank_variables
from powertrain.errors import ConfigError
from powertrain.interfaces.build import EngineSpec, RankSpec, check_head_pair
from powertrain.launch.ports import free_port
from powertrain.options import resolve

if TYPE_CHECKING:
    from powertrain.layout import Layout, Pair, Part
    from powertrain.registry import Registry
    from powertrain.specs import Spec, TransferSpec

HOST: Final = "127.0.0.1"
AnySpec = TypeVar("AnySpec", bound="Spec")
_AT_START: Final = "PYTHONHASHSEED"
"""The variable that only acts at an interpreter's start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlan:
    """One engine of a layout.

    name: unique in the run. specs: one for each rank, in rank order. inline: it lives in the driver's process.
    slots: card of each rank. python: interpreter of its workers. needs: the variables that the backend asks for.
    port: of the engine's own, once placed. life: how often it was started again.
    """

    name: str
    part: Part
    specs: tuple[EngineSpec, ...]
    slots: tuple[int, ...]
    inline: bool
    python: str
    needs: Mapping[str, Any]
    port: int = 0
    life: int = 0

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of its worker processes, also of their logs; others in each life."""
        life = f".{self.life}" if self.life else ""
        return tuple(f"{self.name.replace('/', '-')}-r{spec.place.rank}{life}" for spec in self.specs)

    def placed(self) -> EnginePlan:
        """Return the plan with a port of its own, on loopback, where its ranks are to meet."""
        port = free_port()
        meet = f"{HOST}:{port}" if len(self.specs) > 1 else ""
        specs = tuple(replace(spec, place=replace(spec.place, rendezvous=meet)) for spec in self.specs)
        return replace(self, specs=specs, port=port)

    def environments(
        self, *, visible: tuple[str, ...], ranks_on_host: int, user: Mapping[str, str] | None
    ) -> list[tuple[dict[str, str], dict[str, str]]]:
        """Return for each rank its whole environment, and what of it the engine's `prepare` checks (or, inline, sets).

        An inline engine's process has begun already, so the variable that only acts at an interpreter's start is left
        out. Only training ranks in workers get rank variables.
        """
        inherited = {name: value for name, value in os.environ.items() if not (self.inline and name == _AT_START)}
        found = []
        for spec, slot in zip(self.specs, self.slots, strict=True):
            place = spec.place
            rank = rank_variables(place.rank, place.world, place.local_rank, place.world, HOST, self.port)
            env = build_environment(
                inherited=inherited,
                backend=self.needs,
                user=user,
                deterministic=spec.deterministic,
                seed=spec.seed,
                rank=rank if spec.role == "train" and not self.inline else None,
                devices=None if self.inline else device_variables(place.device, visible, [slot]),
                ranks_on_host=ranks_on_host,
            )
            names = {*self.needs, *(user or {}), *(determinism_variables(spec.seed, env) if spec.deterministic else ())}
            names -= {_AT_START} if self.inline else set()
            found.append((env, {name: env[name] for name in sorted(names)}))
        return found


def check_ready(spec: AnySpec, registry: Registry) -> AnySpec:
    """Return the spec; `EngineNotReadyError` for one that is only planned."""
    if spec.status == "planned":
        registry.load_class(spec)
    return spec


def plan_engines(
    layout: Layout, templates: Mapping[str, EngineSpec], *, registry: Registry, inline: str, head_mismatch: str
) -> tuple[list[EnginePlan], bool]:
    """Return every engine of a layout, in the order written, and whether the LM heads of all pairs agree.

    templates: for each part's label, the spec that its ranks share; backend, role, part, axes, options and place are
    filled in here (options given in the template lie under the layout's). inline: "auto" puts engines of one rank
    without an interpreter of their own into the driver's process, where they see the same cards as in a worker;
    "never" none. `ConfigError` for a part without a template, an inline part that cannot be, or heads that differ.
    """
    labels = [part.label for part in layout.parts]
    if set(labels) != set(templates):
        given = ", ".join(templates) or "none"
        message = f"the layout has the parts {', '.join(labels)}, but specs are given for {given}"
        raise ConfigError(message)
    allow = head_mismatch == "allow"
    pairs = [(templates[pair.train.label].head, templates[pair.infer.label].head) for pair in layout.pairs]
    agree = all(check_head_pair(train, infer, allow_mismatch=allow) for train, infer in pairs)
    return [
        _plan(part, instance, templates[part.label], registry, inline)
        for part in layout.parts
        for instance in range(part.instances)
    ], agree


def _plan(part: Part, instance: int, template: EngineSpec, registry: Registry, inline: str) -> EnginePlan:
    check_ready(part.spec, registry)
    if part.python and not shutil.which(part.python):
        what = f"part {part.label!r} has python={part.python!r}, which is no program on this host"
        message = f"{what}; give the interpreter of an environment that powertrain is installed in"
        raise ConfigError(message)
    options = resolve(part.spec.options, {**template.options, **part.engine_options}, where=f"part {part.label}")
    axes = {**part.axes, **{f"ffn.{axis}": size for axis, size in (part.expert_axes or {}).items()}}
    base = replace(template, backend=part.backend, role=part.role, part=part.label, axes=axes, options=options)
    world, device = part.cards_per_instance, template.place.device
    places = [part.place(rank) for rank in range(instance * world, (instance + 1) * world)]
    same: dict[str, Any] = {"world": world, "instance": instance, "device": device}
    ranks = [
        RankSpec(rank=rank, local_rank=rank, coordinates=dict(place.coordinates), **same)
        for rank, place in enumerate(places)
    ]
    # The backend is told where its ranks will meet, though not yet on which port.
    asking = replace(base, place=replace(ranks[0], rendezvous=f"{HOST}:0" if world > 1 else ""))
    return EnginePlan(
        name=part.label if part.instances == 1 else f"{part.label}/{instance}",
        part=part,
        specs=tuple(replace(base, place=rank) for rank in ranks),
        slots=tuple(place.card for place in places),
        inline=_lives_inline(part, device, places[0].card, inline),
        python=part.python or sys.executable,
        needs=registry.load_class(part.spec, "environment")(options, asking) if part.spec.environment else {},
    )


def _lives_inline(part: Part, device: str, card: int, inline: str) -> bool:
    """Decide by the part's own option, else by the run's; the layout has refused what can never be."""
    elsewhere = device == "cuda" and card > 0  # this process computes on its card 0
    if part.inline and elsewhere:
        message = f"part {part.label!r} is to live in the driver's process but has card {card}, not 0; leave inline out"
        raise ConfigError(message)
    able = part.world == 1 and not part.python and not elsewhere
    return able and (inline == "auto" if part.inline is None else part.inline)


def visible_for(layout: Layout, plans: list[EnginePlan]) -> tuple[str, ...]:
    """Return the entries of the visible-devices variable that the layout's slots stand for; none on CPU.

    `DeviceError` with both numbers when there are fewer than the layout has cards.
    """
    if all(plan.specs[0].place.device != "cuda" for plan in plans):
        return ()
    visible = visible_cards(os.environ.get(VISIBLE_VARIABLE), count_cards())
    require_cards(visible, layout.cards)
    return visible


def pick_transfer(pair: Pair, plans: list[EnginePlan], name: str | None, registry: Registry) -> TransferSpec:
    """Choose a pair's transfer: the one named by `via`, else `name`, else the lowest rank among those that reach.

    One that is only planned is never chosen and, when named, refused. All workers of this release are on the driver's
    host.
    """
    ends = [plan for plan in plans if plan.part.label in {pair.train.label, pair.infer.label}]
    reach = {"host", "network"}
    reach |= {"process"} if all(plan.inline for plan in ends) else set()
    reach |= {"device"} if pair.colocated and ends[0].specs[0].place.device == "cuda" else set()
    name = pair.via or name
    if name:
        found = [check_ready(registry.transfer(name), registry)]
    else:
        known = cast("Mapping[str, TransferSpec]", registry.specs("transfer"))
        found = [spec for spec in known.values() if spec.status != "planned"]
    fitting = [spec for spec in found if reach & set(spec.reach)]
    if not fitting:
        each = "; ".join(f"{spec.name!r} reaches within {'/'.join(spec.reach)}" for spec in found)
        takes = f"from {pair.train.label!r} to {pair.infer.label!r} it takes one of {', '.join(sorted(reach))}"
        message = f"no transfer fits: {each or 'none is installed'}, but {takes}"
        raise ConfigError(message)
    return min(fitting, key=lambda spec: (spec.rank, spec.name))
