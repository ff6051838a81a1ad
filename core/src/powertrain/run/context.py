"""What a recipe is handed, and how a run is carried out: check, start engines, run, close; or only described."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from powertrain.devices import resolve_device
from powertrain.env import build_environment
from powertrain.interfaces.build import EngineSpec, RankSpec
from powertrain.interfaces.recipe import Recipe
from powertrain.registry import Registry
from powertrain.run.config import RunConfig
from powertrain.run.folder import RunFolder, explained
from powertrain.runtime.driver import Driver
from powertrain.tensors.lora import adapter_config
from powertrain.weights import TransferReport, VersionCounter


@dataclass
class RunContext:
    """One run, as its recipe sees it.

    config: resolved. folder: the run's, locked by this process; None while a dry run calls `check`. registry: of
    plugins. resumed: the folder is an earlier run's, which may or may not have left a checkpoint. driver, versions,
    model_folder: there once `run` is awaited, not yet in `check`: the started engines, the counter of weight versions
    (`start_version` is the one that the inference engines carry), and the model in HF format on disk.
    """

    config: RunConfig
    folder: RunFolder | None
    registry: Registry
    resumed: bool = False
    model_folder: str = ""
    start_version: str = ""
    driver: Driver = field(init=False)
    versions: VersionCounter = field(init=False)

    async def run(self, recipe: Recipe) -> None:
        """Start the engines, await the recipe, and close everything whatever happens."""
        assert self.folder is not None, "a dry run ends before this"
        self.versions = VersionCounter(self.folder.versions_file)
        version = self.versions.next()
        self.start_version = str(version)
        self.driver = make_driver(
            self.config,
            registry=self.registry,
            run_dir=str(self.folder.path),
            model=self.model_folder,
            synchronous=recipe.synchronous,
        )
        try:
            await self.driver.start(version)
            await recipe.run(self)
        finally:
            await self.driver.close()

    async def push(self, train: str, infer: str) -> TransferReport:
        """Publish a training part's weights, or its adapter, under the next version; the report names it.

        pause_mode and on_sink_failure are the configuration's. Errors as `powertrain.runtime.driver.Driver.push`.
        """
        version = self.versions.next()
        how: dict[str, Any] = {key: self.config[key] for key in ("pause_mode", "on_sink_failure")}
        if spec := self.config.lora:
            config = adapter_config(spec, base_model=self.config["model"])
            how |= {"kind": "adapter", "adapter": version.adapter_name(spec.name), "adapter_config": config}
        return await self.driver.push(train, infer, version, **how)


def make_driver(
    config: RunConfig, *, registry: Registry, run_dir: str, model: str, synchronous: bool = False
) -> Driver:
    """Return the driver of a configuration, checked and not started; model: a folder in HF format.

    synchronous: as `Recipe.synchronous`; handed to transfers that declare the option, where the file gives none.
    """
    options = {name: dict(given) for name, given in config["transfer_options"].items()}
    for name, spec in registry.specs("transfer").items():
        if any(option.name == "synchronous" for option in spec.options):
            options.setdefault(name, {}).setdefault("synchronous", synchronous)
    given = {key: config[key] for key in ("inline", "head_mismatch", "launcher", "launcher_options", "transfer", "env")}
    timeouts = {key: value for key, value in config["timeouts"].items() if key != "engine"}
    given |= {"registry": registry, "run_dir": run_dir, "transfer_options": options, "timeouts": timeouts}
    return Driver(config.layout, engine_specs(config, model), **given)


def engine_specs(config: RunConfig, model: str) -> Mapping[str, EngineSpec]:
    """Return for each part's label what its ranks are built from; layout facts are filled in by the driver.

    A frozen part gets no adapter and no optimizer.
    """
    device = resolve_device(config["device"])
    same = {key: config[key] for key in ("dtype", "seed", "deterministic", "no_save_optim", "no_load_optim")}
    return {
        part.label: EngineSpec(
            backend=part.backend,
            role=part.role,
            model=model,
            head=replace(config.head, fp32=config.head.fp32 if (own := part.options.get("head_fp32")) is None else own),
            lora=None if part.frozen else config.lora,
            optim=config.optim if part.role == "train" and not part.frozen else None,
            place=RankSpec(device=device),
            timeout=config["timeouts"]["engine"],
            **same,
        )
        for part in config.layout.parts
    }


def checked_recipe(context: RunContext) -> Recipe:
    """Return the run's recipe once it has found nothing to refuse."""
    recipe: Recipe = context.registry.load_class(context.config.recipe_spec)(context.config.recipe_options)
    recipe.check(context)
    return recipe


def carry_out(config: RunConfig, folder: RunFolder, *, registry: Registry, resumed: bool) -> RunContext:
    """Check and run a configuration in its folder, to the end or to the first error; returns the context.

    The new folder of a run that is refused before its engines start is taken away again.
    """
    context = RunContext(config, folder, registry, resumed)
    with folder:
        try:
            here = (part.spec for part in config.layout.parts if not part.python)
            registry.require(config.recipe_spec, *here)
            recipe = checked_recipe(context)
            from powertrain.tensors.models import materialize  # which needs torch, so `check` has the first word

            context.model_folder = materialize(config["model"], base=config["base"])
        except BaseException:
            if not resumed:
                shutil.rmtree(folder.path, ignore_errors=True)
            raise
        folder.write_config(config.dump())
        with explained(f"the run in {str(folder.path)!r}"):
            asyncio.run(context.run(recipe))
    return context


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
