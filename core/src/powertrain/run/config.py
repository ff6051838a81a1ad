"""From a recipe file and `key=value` words to one resolved, checked `RunConfig`, and back to YAML.

Everything is resolved before anything starts: no engine is imported, and all faults are told at once. The file that
`RunConfig.dump` writes gives an equal configuration when it is read again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import ConfigError, PluginError, Violations
from powertrain.interfaces.build import HeadSpec, LoraSpec, OptimSpec, ScheduleSpec
from powertrain.layout import Layout, parse_layout
from powertrain.layout.parts import PART_OPTIONS
from powertrain.options import OptionSpec, nearest, resolve
from powertrain.run.options import CORE_OPTIONS, GROUPS, SCHEDULE_OPTIONS
from powertrain.run.recipe_file import read_words, read_yaml, write_yaml

if TYPE_CHECKING:
    from powertrain.layout import Part
    from powertrain.registry import Registry
    from powertrain.specs import RecipeSpec

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
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        """Return a core key's value; KeyError for a key that core does not have."""
        return self.values[key]

    @property
    def head(self) -> HeadSpec:
        """The LM head's precision, one setting for both sides."""
        return HeadSpec(**self.values["head"])

    @property
    def lora(self) -> LoraSpec | None:
        """The adapter to train, or None for full training."""
        lora = self.values["lora"]
        return None if lora is None else LoraSpec(**lora)

    @property
    def optim(self) -> OptimSpec:
        """The optimizer; `schedule.total_steps` is the recipe's option `steps` where the file gives none."""
        optim = dict(self.values["optim"])
        schedule = dict(optim.pop("schedule"))
        if schedule["total_steps"] is None:
            schedule["total_steps"] = self.recipe_options.get("steps")
        optim["clip"] = optim["clip"] or None
        return OptimSpec(**optim, schedule=ScheduleSpec(**schedule))

    def engine_options(self, part: Part) -> dict[str, Any]:
        """Return the backend's options for one part, defaults filled in."""
        return resolve(part.spec.options, part.engine_options, where=f"part {part.label}")

    def path(self, text: str) -> Path:
        """Return the file or folder that a relative path in the recipe file means: from `base`, else from here."""
        given = Path(text).expanduser()
        inside = Path(self.values["base"]) / given
        return inside if inside.exists() or not given.exists() else given.absolute()

    def to_mapping(self) -> dict[str, Any]:
        """Return the whole configuration as plain data, in the form of a recipe file."""
        recipe = {self.recipe_spec.name: dict(self.recipe_options)}
        return copy.deepcopy({**self.values, **{k: dict(v) for k, v in self.sections.items()}, **recipe})

    def dump(self) -> str:
        """Return `to_mapping` as YAML text."""
        return write_yaml(self.to_mapping())


def load_config(
    file: str | Path, overrides: Sequence[str] = (), *, registry: Registry | None = None, fixed: Iterable[str] = ()
) -> RunConfig:
    """Read a recipe file, lay `key=value` words over it and resolve the result.

    fixed: keys that an override must not change (a resumed run's). Raises `Violations` with every fault found, or
    `ConfigError` when the file or a word cannot be read at all.
    """
    path = Path(file)
    data = read_yaml(path)
    words, problems = read_words(overrides)
    problems += [
        f"{'.'.join(keys)!r} cannot be changed in a run that has begun" for keys, _ in words if keys[0] in set(fixed)
    ]
    for keys, value in words:
        problems += _lay_over(data, keys, value)
    if problems:
        raise Violations(problems)
    defaults = {"base": str(path.absolute().parent), "name": path.stem}
    return resolve_config({**data, **{k: v for k, v in defaults.items() if data.get(k) is None}}, registry=registry)


def _lay_over(data: dict[str, Any], keys: Sequence[str], value: Any) -> list[str]:
    """Set a dotted key in place, making the mappings on its way; returns faults."""
    table = data
    for depth, key in enumerate(keys[:-1], start=1):
        below = table.get(key)
        if below is None:
            below = table[key] = {}
        if not isinstance(below, dict):
            return [f"{'.'.join(keys)!r}: {'.'.join(keys[:depth])!r} is {below!r} and holds no keys"]
        table = below
    table[keys[-1]] = value
    return []


def resolve_config(data: Mapping[str, Any], *, registry: Registry | None = None) -> RunConfig:
    """Resolve a recipe file's mapping; raises `Violations` with every fault."""
    from powertrain.registry import Registry as _Registry

    registry = registry or _Registry()
    problems = [f"{key!r} is required: {_CORE[key].help}" for key in _REQUIRED if data.get(key) is None]
    core = {key: value for key, value in data.items() if key in _CORE}
    values = _core_values(core, problems)
    layout = _attempt(lambda: parse_layout(data["engines"], registry=registry), data.get("engines"), problems)
    spec = _attempt(lambda: registry.recipe(str(data["recipe"])), data.get("recipe"), problems)
    options: dict[str, Any] = {}
    if spec is not None:
        options = _resolved(spec.options, data.get(spec.name), f"section {spec.name!r}", problems)
    given = {str(key): value for key, value in data.items() if key not in _CORE}
    if spec is not None:
        given.pop(spec.name, None)
    merged, sections = _sections(layout, given, spec.name if spec else None, registry, problems)
    if problems or layout is None or spec is None or merged is None:
        raise Violations(problems, heading=f"the configuration has {len(problems)} fault{'s' * (len(problems) != 1)}:")
    values["engines"] = data["engines"] if isinstance(data["engines"], str) else layout.to_mapping()
    values["base"] = str(Path(values["base"] or ".").absolute())
    values["name"] = values["name"] or spec.name
    config = RunConfig(values=values, layout=merged, recipe_spec=spec, recipe_options=options, sections=sections)
    model = Path(values["base"]) / values["model"]
    if model.is_dir():
        values["model"] = str(model)
    return config


def _attempt(call: Any, given: Any, problems: list[str]) -> Any:
    if given is None:
        return None
    try:
        return call()
    except (ConfigError, PluginError) as exc:
        problems.append(str(exc))
        return None


def _core_values(given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    plain = {key: value for key, value in given.items() if key != "engines" and value is not None}
    plain |= {key: None for key, value in given.items() if value is None and _CORE[key].default is None}
    values = _resolved(CORE_OPTIONS, plain, "", problems)
    for key, specs in GROUPS.items():
        if values.get(key) is not None:
            values[key] = _resolved(specs, values[key], f"{key!r}", problems)
    if isinstance(values.get("optim"), dict):
        schedule = values["optim"].get("schedule") or {}
        values["optim"]["schedule"] = _resolved(SCHEDULE_OPTIONS, schedule, "'optim.schedule'", problems)
    bad = [key for key, value in (values.get("env") or {}).items() if not isinstance(value, str)]
    problems += [f"'env.{key}' is {values['env'][key]!r}; variables are text, quote it" for key in bad]
    return values


def _resolved(specs: Sequence[OptionSpec], given: Any, where: str, problems: list[str]) -> dict[str, Any]:
    """Resolve a section; on a fault note all of it and go on with the keys that are right."""
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        problems.append(f"{where} is {given!r}; it must be a mapping of options")
        given = {}
    values: dict[str, Any] = {}
    unknown = {str(key): value for key, value in given.items() if key not in {spec.name for spec in specs}}
    for spec in specs:
        try:
            values |= resolve([spec], {spec.name: given[spec.name]} if spec.name in given else {}, where=where)
        except Violations as exc:
            problems.extend(problem.removeprefix(": ") for problem in exc.problems)
            values[spec.name] = spec.default
    if unknown:
        try:
            resolve(specs, unknown, where=where)
        except Violations as exc:
            problems.extend(problem.removeprefix(": ") for problem in exc.problems)
    return copy.deepcopy(values)


def _sections(
    layout: Layout | None, given: dict[str, Any], recipe: str | None, registry: Registry, problems: list[str]
) -> tuple[Layout | None, dict[str, dict[str, Any]]]:
    """Merge the engine sections into the layout; returns it with what is written back."""
    if layout is None:
        return None, {}
    specs = {name: part.spec for part in layout.parts for name in (part.backend, part.label)}
    known = [*_CORE, *specs, *([recipe] if recipe else [])]
    for key in given:
        if key not in specs and recipe is not None:
            problems.append(
                f"unknown key {key!r}{nearest(key, known)}; beside core's keys there are the sections: "
                + ", ".join(sorted({*specs, recipe}))
            )
    problems += [
        f"part {part.label!r} has the name of a key or of the recipe; name it otherwise, so that its section is its own"
        for part in layout.parts
        if part.label in _CORE or part.label == recipe
    ]
    typed: dict[str, dict[str, Any]] = {}
    for name, spec in specs.items():
        section = given.get(name) or {}
        all_options = _resolved((*spec.options, *PART_OPTIONS), section, f"section {name!r}", problems)
        typed[name] = {key: all_options[key] for key in section if key in all_options}
    back = {part.backend: {o.name: o.default for o in part.spec.options} | typed[part.backend] for part in layout.parts}
    back |= {part.label: typed[part.label] for part in layout.parts if part.name and typed[part.label]}
    if problems:
        return None, back
    mapping = layout.to_mapping()
    for group, written in zip(layout.groups, mapping["groups"], strict=True):
        for part, raw in zip(group, written, strict=True):
            raw["options"] = {**back[part.backend], **typed[part.label], **part.options}
    return Layout.from_mapping(mapping, registry=registry), back
