"""Where every rank of a layout goes: pure data made from the layout, before anything starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from powertrain.devices import VISIBLE_VARIABLE, count_cards, device_variables, require_cards, visible_cards
from powertrain.env import build_environment, determinism_variables, rank_variables
from powertrain.errors import ConfigError
from powertrain.interfaces.build import EngineSpec, RankSpec, check_head_pair
from powertrain.options import resolve

if TYPE_CHECKING:
    from powertrain.layout import Layout, Part
    from powertrain.registry import Registry

HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlan:
    """One engine of a layout.

    name: unique in the run. specs: one for each rank, in rank order. inline: it lives in the driver's process.
    slots: card of each rank. python: interpreter of its workers. needs: the variables that the backend asks for.
    port: of its own rendezvous, on loopback; 0 for one rank.
    """

    name: str
    part: Part
    specs: tuple[EngineSpec, ...]
    slots: tuple[int, ...]
    inline: bool
    python: str
    needs: Mapping[str, Any]
    port: int = 0

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of its worker processes, also of their logs."""
        return tuple(f"{self.name.replace('/', '-')}-r{spec.place.rank}" for spec in self.specs)

    def at(self, port: int) -> EnginePlan:
        """Return the plan with its rendezvous filled in."""
        place = f"{HOST}:{port}" if len(self.specs) > 1 else ""
        specs = tuple(replace(spec, place=replace(spec.place, rendezvous=place)) for spec in self.specs)
        return replace(self, specs=specs, port=port)


def plan_engines(
    layout: Layout, templates: Mapping[str, EngineSpec], *, registry: Registry, inline: str, head_mismatch: str
) -> tuple[list[EnginePlan], bool]:
    """Return every engine of a layout, in the order written, and whether the LM heads of all pairs agree.

    templates: for each part's label, the spec that its ranks share; backend, role, part, axes, options and place are
    filled in here (options given in the template lie under the layout's). inline: "auto" puts engines of one rank
    without an interpreter of their own into the driver's process, where they see the same cards as in a worker;
    "never" none. `ConfigError` for a part without a template, an inline part that cannot be, or heads that differ.
    """
    if inline not in {"auto", "never"}:
        message = f"inline is {inline!r}; it takes auto or never"
        raise ConfigError(message)
    labels = [part.label for part in layout.parts]
    if set(labels) != set(templates):
        message = (
            f"the layout has the parts {', '.join(labels)}, but specs are given for {', '.join(templates) or 'none'}"
        )
        raise ConfigError(message)
    agree = [
        check_head_pair(
            templates[pair.train.label].head, templates[pair.infer.label].head, allow_mismatch=head_mismatch == "allow"
        )
        for pair in layout.pairs
    ]
    plans = [
        _plan(part, instance, templates[part.label], registry, inline)
        for part in layout.parts
        for instance in range(part.instances)
    ]
    return plans, all(agree)


def _plan(part: Part, instance: int, template: EngineSpec, registry: Registry, inline: str) -> EnginePlan:
    if part.spec.status == "planned":
        registry.load_class(part.spec)  # says that there is no engine yet
    options = resolve(part.spec.options, {**template.options, **part.engine_options}, where=f"part {part.label}")
    base = replace(
        template,
        backend=part.backend,
        role=part.role,
        part=part.label,
        axes={**part.axes, **{f"ffn.{axis}": size for axis, size in (part.expert_axes or {}).items()}},
        options=options,
    )
    first = instance * part.cards_per_instance
    places = [part.place(first + rank) for rank in range(part.cards_per_instance)]
    specs = tuple(
        replace(
            base,
            place=RankSpec(
                rank=place.rank_in_instance,
                world=part.cards_per_instance,
                local_rank=place.rank_in_instance,
                instance=instance,
                coordinates=dict(place.coordinates),
                device=template.place.device,
            ),
        )
        for place in places
    )
    needs = registry.load_class(part.spec, "environment")(options, base) if part.spec.environment else {}
    return EnginePlan(
        name=part.label if part.instances == 1 else f"{part.label}/{instance}",
        part=part,
        specs=specs,
        slots=tuple(place.card for place in places),
        inline=_lives_inline(part, template.place.device, places[0].card, inline),
        python=part.python or sys.executable,
        needs=needs,
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


def environments(
    plan: EnginePlan,
    *,
    visible: tuple[str, ...],
    ranks_on_host: int,
    user: Mapping[str, str] | None,
    inherited: Mapping[str, str] | None,
) -> list[dict[str, str]]:
    """Return the variables of every rank: a worker's whole environment; of an inline engine what is asked of it.

    An inline engine's process has begun already, so the variable that only acts at an interpreter's start is left
    out. Only training ranks get rank variables.
    """
    seed, deterministic = plan.specs[0].seed, plan.specs[0].deterministic
    if plan.inline:
        asked = {**plan.needs, **(user or {})}
        if deterministic:
            here = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
            asked = {**determinism_variables(seed, {**here, **asked}), **asked}
            asked.pop("PYTHONHASHSEED", None)
        return [{name: str(value) for name, value in asked.items()}]
    found = []
    for spec, slot in zip(plan.specs, plan.slots, strict=True):
        place = spec.place
        rank = rank_variables(place.rank, place.world, place.local_rank, place.world, HOST, plan.port)
        found.append(
            build_environment(
                inherited=inherited,
                backend=plan.needs,
                user=user,
                deterministic=deterministic,
                seed=seed,
                rank=rank if spec.role == "train" else None,
                devices=device_variables(place.device, visible, [slot]),
                ranks_on_host=ranks_on_host,
            )
        )
    return found


def asked_of(plan: EnginePlan, env: Mapping[str, str], user: Mapping[str, str] | None) -> dict[str, str]:
    """Return those variables of a rank's environment that its engine's `prepare` is to check (or, inline, to set)."""
    if plan.inline:
        return dict(env)
    names = {*plan.needs, *(user or {})}
    if plan.specs[0].deterministic:
        names |= set(determinism_variables(plan.specs[0].seed, env))
    return {name: env[name] for name in sorted(names)}
