"""Where a configuration's ranks would go, in words, and the environment that engines in this process need."""

from __future__ import annotations

from collections.abc import Mapping

from powertrain.env import build_environment
from powertrain.registry import Registry
from powertrain.run.config import RunConfig
from powertrain.run.context import make_driver


def describe(config: RunConfig, registry: Registry) -> str:
    """Return YAML comments: each rank's card, or slot on CPU, and process, and each pair's transfer.

    Makes the driver, which checks all that can be checked, and starts nothing.
    """
    driver = make_driver(config, registry=registry, run_dir="", model=config["model"])
    lines = ["# placement"]
    for plan in driver.plans:
        for spec, slot in zip(plan.specs, plan.slots, strict=True):
            card = f"card {slot}" if spec.place.device == "cuda" else f"slot {slot} (cpu)"
            where = "in the driver's process" if plan.inline else f"worker {plan.workers[spec.place.rank]}"
            lines.append(f"#   {plan.name} ({spec.backend}, {spec.role}) rank {spec.place.rank}: {card}, {where}")
    lines += [f"#   weights {train} -> {infer}: {spec.name}" for (train, infer), spec in driver.picked.items()]
    return "\n".join(lines) + "\n"


def inline_environment(config: RunConfig, registry: Registry, environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return the environment that this process must be started in, or None where no engine lives in it.

    environ: what it has now. The process counts as one rank, since its engines take turns; each worker as another.
    """
    plans = make_driver(config, registry=registry, run_dir="", model=config["model"]).plans
    inline = [plan for plan in plans if plan.inline]
    if not inline:
        return None
    needs = {name: value for plan in inline for name, value in plan.needs.items()}
    return build_environment(
        inherited=environ,
        backend=needs,
        user=config["env"],
        deterministic=config["deterministic"],
        seed=config["seed"],
        ranks_on_host=1 + sum(len(plan.specs) for plan in plans if not plan.inline),
    )
