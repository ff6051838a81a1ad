"""From a recipe file and `key=value` words to one resolved, checked `RunConfig`, and back to YAML.

Everything is resolved before anything starts: no engine is imported, and all faults are told at once. The file that
`RunConfig.dump` writes gives an equal configuration when it is read again.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from powertrain.env import variable_fault
from powertrain.errors import ConfigError, PluginError, Violations
from powertrain.interfaces.build import HeadSpec, LoraSpec, OptimSpec, ScheduleSpec
from powertrain.layout import Layout, Part, parse_layout
from powertrain.layout.parts import PART_OPTIONS
from powertrain.options import OptionSpec, collect, is_none, nearest, resolve, shown
from powertrain.registry import Registry
from powertrain.run.options import CORE_OPTIONS, GROUPS, SCHEDULE_OPTIONS
from powertrain.run.recipe_file import lay_over, read_yaml, write_yaml
from powertrain.specs import RecipeSpec
from powertrain.tensors.models import locate
from powertrain.tensors.schedules import check_schedule

_REQUIRED: Final = ("recipe", "engines", "model")
_CORE: Final = {spec.name: spec for spec in CORE_OPTIONS}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run's configuration with every default filled in.

    values: the core keys (see `powertrain.run.options`) as plain data. layout: the parsed config string, each part's
    options merged from string and sections. recipe_spec/recipe_options: the recipe and its section. sections: the
    engine sections as they are written back: each backend's with its defaults, each part's as given.
    """

    values: Mapping[str, Any]
    layout: Layout
    recipe_spec: RecipeSpec
    recipe_options: Mapping[str, Any]
    sections: Mapping[str, Mapping[str, Any]]

    def __getitem__(self, key: str) -> Any:
        """Return a core key's value; KeyError for a key that core does not have."""
        return self.values[key]

    @property
    def head(self) -> HeadSpec:
        """The LM head's precision, one setting for both sides."""
        return HeadSpec(**self["head"])

    @property
    def lora(self) -> LoraSpec | None:
        """The adapter to train, or None for full training."""
        return LoraSpec(**self["lora"]) if self["lora"] else None

    @property
    def optim(self) -> OptimSpec:
        """The optimizer; `schedule.total_steps` is the recipe's option `steps` where the file gives none."""
        optim = self["optim"]
        schedule = _schedule(optim["schedule"], self.recipe_options)
        return OptimSpec(**{**optim, "clip": optim["clip"] or None, "schedule": schedule})

    def engine_options(self, part: Part) -> dict[str, Any]:
        """Return the backend's options for one part, defaults filled in."""
        return resolve(part.spec.options, part.engine_options, where=f"part {part.label}")

    def path(self, text: str) -> Path:
        """Return the file or folder that a relative path in the recipe file means: from `base`, else from here."""
        given = Path(text).expanduser()
        inside = Path(self.values["base"]) / given
        # Not Path.exists, which raises for a name that is too long.
        return inside if os.path.exists(inside) or not os.path.exists(given) else given.absolute()  # noqa: PTH110

    def to_mapping(self) -> dict[str, Any]:
        """Return the whole configuration as plain data, in the form of a recipe file."""
        return copy.deepcopy({**self.values, **self.sections, self.recipe_spec.name: self.recipe_options})

    def dump(self) -> str:
        """Return `to_mapping` as YAML text."""
        return write_yaml(self.to_mapping())


def load_config(
    file: str | Path, overrides: Sequence[str] = (), *, registry: Registry | None = None, fixed: Sequence[str] = ()
) -> RunConfig:
    """Read a recipe file, lay `key=value` words over it and resolve the result.

    fixed: keys that an override must not change (a resumed run's). Raises `Violations` with every fault found, or
    `ConfigError` when the file or a word cannot be read at all.
    """
    path = Path(file)
    data = read_yaml(path)
    problems = lay_over(data, overrides, fixed=fixed)
    if problems:
        raise Violations(problems)
    for key, default in (("base", str(path.absolute().parent)), ("name", path.stem)):
        if data.get(key) is None:
            data[key] = default
    return resolve_config(data, registry=registry)


def resolve_config(data: Mapping[str, Any], *, registry: Registry | None = None) -> RunConfig:
    """Resolve a recipe file's mapping; raises `Violations` with every fault."""
    registry = registry or Registry()
    problems: list[str] = []
    values = _core_values(data, problems)
    # A misspelt key is one fault, so what it was meant for is not told as missing too.
    meant = "".join(nearest(str(key), _CORE) for key in data if key not in _CORE)
    needed = [key for key in _REQUIRED if is_none(data.get(key)) and repr(key) not in meant]
    problems += [f"{key!r} is required: {_CORE[key].help}" for key in needed]
    values["transfer_options"] = _transfer_options(values["transfer_options"], registry, problems)
    written = None if is_none(data.get("engines")) else data["engines"]
    layout = _found(written, lambda text: parse_layout(text, registry=registry), problems)
    base = Path(values["base"] or ".").expanduser().absolute()
    if not os.path.isdir(base):  # noqa: PTH112 - as in `path`
        problems.append(f"'base' is {shown(str(base))}, which is no folder; relative paths are read from it")
    else:
        _found(values["model"], lambda model: locate(model, base), problems)
    recipe = _found(values["recipe"], registry.recipe, problems)
    sections = _sections(data, layout, recipe, registry, problems)
    if recipe:  # whose `steps` the schedule may need
        schedule = _schedule(values["optim"]["schedule"], sections.get(recipe.name, {}))
        _found(schedule, check_schedule, problems, where="'optim.schedule': ")
    if problems:
        raise Violations(problems, heading=f"the configuration has {len(problems)} fault{'s' * (len(problems) != 1)}:")
    model = base / values["model"]
    values |= {
        "engines": data["engines"] if isinstance(data["engines"], str) else layout.to_mapping(),
        "base": str(base),
        "name": values["name"] or recipe.name,
        "model": str(model) if os.path.isdir(model) else values["model"],  # noqa: PTH112 - as in `path`
    }
    own = {"recipe_spec": recipe, "recipe_options": sections.pop(recipe.name, {})}
    return RunConfig(values=values, layout=_merged(layout, sections, registry), sections=sections, **own)


def _schedule(given: Mapping[str, Any], recipe_options: Mapping[str, Any]) -> ScheduleSpec:
    return ScheduleSpec(**{**given, "total_steps": given["total_steps"] or recipe_options.get("steps")})


def _found(given: Any, find: Callable[[Any], Any], problems: list[str], where: str = "") -> Any:
    """Return what `find` makes of a value, or None where there is none or it is faulty."""
    try:
        return None if given is None else find(given)
    except (ConfigError, PluginError) as exc:
        problems += [where + told for told in getattr(exc, "problems", (str(exc),))]
        return None


def _core_values(data: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return every core key's value, those that are mappings with all their options."""
    given = {key: value for key, value in data.items() if key in _CORE and key != "engines" and value is not None}
    values = collect(CORE_OPTIONS, given, where="", problems=problems)
    for key, specs in GROUPS.items():
        if values[key] is not None:
            values[key] = collect(specs, values[key], where=repr(key), problems=problems)
    optim = values["optim"]
    optim["schedule"] = collect(SCHEDULE_OPTIONS, optim["schedule"], where="'optim.schedule'", problems=problems)
    problems += [f"'optim.{key}' is 1; it must be below 1" for key in ("beta1", "beta2") if optim[key] == 1]
    targets = values["lora"]["targets"] if values["lora"] else ["none"]
    if not targets or not all(isinstance(target, str) and target for target in targets):
        told = f"'lora.targets' is {shown(targets)}; it takes the ends of modules' names, one at least"
        problems.append(f"{told}; leave it out for the usual ones")
    faults = (variable_fault(name, value, text_only=True) for name, value in values["env"].items())
    problems += [f"'env': {fault}" for fault in faults if fault]
    return values


def _transfer_options(
    given: Mapping[Any, Any], registry: Registry, problems: list[str]
) -> dict[str, Mapping[str, Any]]:
    """Return the mapping of transfers to their options as given, a null as none; each name and option is checked."""
    known = {name: spec.options for name, spec in registry.specs("transfer").items()} if given else {}
    for name, options in given.items():
        if name in known:
            collect(known[name], options, where=f"transfer {name}", problems=problems)
        else:
            hint = _meant(str(name), known, known)
            problems.append(f"transfer_options: {name!r} is no transfer{hint}; there are: {', '.join(known)}")
    return {name: options or {} for name, options in given.items()}


def _sections(
    data: Mapping[str, Any], layout: Layout | None, recipe: RecipeSpec | None, registry: Registry, problems: list[str]
) -> dict[str, dict[str, Any]]:
    """Return the sections: the recipe's and each backend's with all defaults, each named part's as it is given."""
    parts = layout.parts if layout else ()
    tables = {part.label: (part.spec.options, False) for part in parts}
    tables |= {part.backend: (part.spec.options, True) for part in parts}
    tables |= {recipe.name: (recipe.options, True)} if recipe else {}
    groups = {**GROUPS, **{name: options for name, (options, _) in tables.items()}}
    for key in (key for key in data if key not in _CORE and key not in tables):
        if key in registry.names("backend") and layout:
            problems.append(f"section {key!r}: no part of the layout is of that backend")
        elif (layout and recipe) or nearest(str(key), _CORE):  # else it may be a section of what is not known
            hint, listed = _meant(str(key), groups, [*_CORE, *tables]), ", ".join(sorted(tables)) or "none"
            problems.append(f"unknown key {key!r}{hint}; beside core's keys there are the sections: {listed}")
    problems += [
        f"part {part.label!r} has the name of a key or of the recipe; name it otherwise, so its section is its own"
        for part in parts
        if part.label in _CORE or (recipe and part.label == recipe.name)
    ]
    sections = {}
    for name, (options, whole) in tables.items():
        given = data.get(name)
        own = options if recipe and name == recipe.name else (*options, *PART_OPTIONS)
        where = f"section {name!r}"
        values = collect(own, given, where=where, problems=problems, hint=lambda key, own: _meant(key, groups, own))
        kept = {option.name for option in options if whole and option.listed}.union(
            given if isinstance(given, Mapping) else ()
        )
        sections[name] = {key: value for key, value in values.items() if key in kept}
    return {name: section for name, section in sections.items() if section}


def _meant(key: str, groups: Mapping[str, Sequence[OptionSpec]], known: Iterable[str]) -> str:
    """Return a hint for an unknown key: the groups that have an option of that name, else the nearest known key."""
    homes = [f"'{name}.{key}'" for name, options in groups.items() if key in {option.name for option in options}]
    return f" (did you mean {' or '.join(homes)}?)" if homes else nearest(key, known)


def _merged(layout: Layout, sections: Mapping[str, Mapping[str, Any]], registry: Registry) -> Layout:
    """Return the layout with each part's options from the sections and, winning over them, from the string."""
    mapping = layout.to_mapping()
    for group, written in zip(layout.groups, mapping["groups"], strict=True):
        for part, raw in zip(group, written, strict=True):
            raw["options"] = {**sections.get(part.backend, {}), **sections.get(part.label, {}), **part.options}
    return Layout.from_mapping(mapping, registry=registry)
