"""Write the generated pages of docs/reference from the code: options, command line, plugins and Python API.

`python scripts/reference.py` writes them, `--check` only says which are stale. Run it in an environment of `make env`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from reference_api import NOTE, api, escaped, prose, table

from powertrain.cli.main import COMMANDS
from powertrain.layout import PART_OPTIONS
from powertrain.options import OptionSpec, collect
from powertrain.registry import KIND_OF_GROUP, Registry
from powertrain.run.options import CORE_OPTIONS, GROUPS, SCHEDULE_OPTIONS
from powertrain.specs import CAPABILITIES, BackendSpec, Spec, TransferSpec

ROOT = Path(__file__).resolve().parent.parent
SCHEDULE = collect(SCHEDULE_OPTIONS, {}, where="", problems=[])
"""The default of `optim.schedule`, with all that is in it."""
STATUS = {"backend": "it is explained, not run", "transfer": "it is named, not used"}
"""What can be done with a planned plugin of a kind."""


# ---- text
def shown(value: Any) -> str:
    """Return a default as one writes it in YAML."""
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return f"`{text}`"


# ---- options
def allowed(option: OptionSpec) -> str:
    """Return in words what an option takes beside its type."""
    if option.choices:
        return ", ".join(shown(choice) for choice in option.choices)
    least, most = (None if bound is None else f"{bound:g}" for bound in (option.minimum, option.maximum))
    if option.maximum is not None and option.maximum == 2**63 - 1:
        most = "2^63 - 1"
    if least is None:
        return "" if most is None else f"at most {most}"
    return f"at least {least}" if most is None else f"{least} to {most}"


def options(specs: Iterable[OptionSpec], defaults: Mapping[str, Any] | None = None) -> str:
    """Return the table of some options; defaults: values to show in place of the specs' own."""
    rows = [
        (
            f"`{spec.name}`",
            spec.type + (" or null" if spec.default is None else ""),
            shown((defaults or {}).get(spec.name, spec.default)),
            allowed(spec),
            escaped(spec.help[:1].upper() + spec.help[1:].rstrip(".")) + ".",
        )
        for spec in specs
    ]
    return table(("name", "type", "default", "allowed", "meaning"), rows) if rows else "No options.\n"


def passed_on(specs: Iterable[OptionSpec]) -> str:
    """Return the options that an engine takes as they are, by their types, in one list."""
    found: dict[str, list[str]] = {}
    for spec in specs:
        found.setdefault(spec.type, []).append(f"`{spec.name}`")
    items = [f"- {kind}: {', '.join(sorted(names))}" for kind, names in sorted(found.items())]
    count = sum(map(len, found.values()))
    return f"{count} more are handed on to the engine, by type:\n\n" + "\n".join(items) + "\n" if found else ""


def own_registry() -> Registry:
    """Return a registry of this repository's dists alone, whatever else is installed."""
    files = [ROOT / "core" / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
    return Registry(allow=[tomllib.loads(file.read_text())["project"]["name"] for file in files])


def plugins(registry: Registry) -> Iterator[tuple[str, Spec]]:
    """Yield (kind, spec) of every plugin, those that are there first."""
    for kind in KIND_OF_GROUP.values():
        found = [registry.get(kind, name) for name in registry.names(kind)]
        yield from ((kind, spec) for spec in sorted(found, key=lambda spec: (spec.status == "planned", spec.name)))


def filled(key: str) -> Any:
    """Return the default of one of core's mappings with all that is in it."""
    return collect(GROUPS[key], {}, where=key, problems=[])


def configuration(registry: Registry) -> str:
    """Return the page of all options."""
    mappings = {spec.name: filled(spec.name) for spec in CORE_OPTIONS if spec.name in GROUPS and spec.default == {}}
    mappings["optim"]["schedule"] = SCHEDULE
    text = [
        "# Configuration reference\n",
        NOTE,
        (
            "Every option, from the code that reads it. In a recipe file the keys of core stand at the top, those of a "
            "recipe in a section of its name, those of an engine in a section named after its part or its backend; on "
            "the command line and in `key=value` words dots reach inside (`optim.lr=1e-5`). An option of an engine can "
            "also stand in the config string (`hf:d2?max_rows=64`), which wins over the part's section, and that over "
            "the backend's.\n\n`null` means: at a key of core, or for a whole section, as if it were not given, so its "
            'default; for an option inside of a section, the value none, which only those of a type "or null" take (an '
            "option that is left out has its default). Under `env` it is refused: a variable is text, quote it.\n"
        ),
        "## Keys of core\n",
        options(CORE_OPTIONS, mappings),
    ]
    for key, specs in {**GROUPS, "optim.schedule": SCHEDULE_OPTIONS}.items():
        text += [f"### `{key}`\n", options(specs, {"schedule": SCHEDULE})]
    text += [
        "## Options of every part\n",
        "They stand in the config string, or in the section of a part or a backend, of every backend.\n",
        options(PART_OPTIONS),
    ]
    places = {
        "transfer": "`transfer_options.{0}` of a recipe file holds them.\n",
        "launcher": "`launcher_options` of a recipe file holds them, with `launcher: {0}`.\n",
        "recipe": "The section `{0}` of a recipe file holds them.\n",
    }
    for kind, spec in plugins(registry):
        role = f", {spec.role}" if isinstance(spec, BackendSpec) else ""
        status = f" Not there yet in this release: {STATUS[kind]}.\n" if spec.status == "planned" else "\n"
        text += [f"## {kind.capitalize()} `{spec.name}`\n", f"{escaped(spec.summary)}{role}.{status}"]
        text += [places[kind].format(spec.name)] if spec.options and kind in places else []
        # A page that is the same everywhere does not go by the version of an engine that is installed here.
        specs = getattr(spec.options, "shipped", spec.options)
        text += [options([option for option in specs if option.listed])]
        text += filter(None, [passed_on([option for option in specs if not option.listed])])
    missing = [kind for kind in KIND_OF_GROUP.values() if not registry.names(kind)]
    text += [f"This release brings no plugin of the kinds {' and '.join(missing)}.\n"] if missing else []
    return "\n".join(text)


def listing(registry: Registry) -> str:
    """Return the page of plugins and capabilities."""
    found = list(plugins(registry))
    engines = [spec for _, spec in found if isinstance(spec, BackendSpec)]
    rows = [
        (
            f"`{spec.name}`",
            spec.role,
            " ".join(f"`{name}`" for name in spec.axis_table()),
            "ready" if spec.status == "ready" else "engine not there yet",
            escaped(spec.summary),
        )
        for spec in engines
    ]
    ready = [spec for spec in engines if spec.status == "ready"]
    levels = [
        (f"`{name}`", escaped(meaning), *(level(spec, name) for spec in ready))
        for name, meaning in CAPABILITIES.items()
    ]
    moves = [
        (f"`{spec.name}`", ", ".join(spec.reach), str(spec.rank), status_word(spec), escaped(spec.summary))
        for _, spec in found
        if isinstance(spec, TransferSpec)
    ]
    rest = [
        (f"`{spec.name}`", kind, status_word(spec), escaped(spec.summary))
        for kind, spec in found
        if not isinstance(spec, BackendSpec | TransferSpec)
    ]
    return "\n".join(
        [
            "# What this release brings\n",
            NOTE,
            "`powertrain engines` prints what is installed, `powertrain engines --check` tries each one.\n",
            "## Backends\n",
            table(("name", "role", "axes", "status", "what it is"), rows),
            "## Capabilities\n",
            (
                "What a spec says of its engine: `full`, `partial` (in some layouts or versions), `none`, or nothing, "
                "which counts as `none` where a guarantee depends on it.\n"
            ),
            table(("capability", "meaning", *(f"`{spec.name}`" for spec in ready)), levels),
            "## Transfers\n",
            "Among those that reach both engines, the lowest rank is picked unless `via` or `transfer` names one.\n",
            table(("name", "reach", "rank", "status", "what it does"), moves),
            "## Launchers and recipes\n",
            table(("name", "kind", "status", "what it does"), rest),
        ]
    )


def level(spec: BackendSpec, name: str) -> str:
    """Return how far a backend has a capability."""
    return spec.capabilities[name].value if name in spec.capabilities else ""


def status_word(spec: Spec) -> str:
    """Return a spec's status in words."""
    return "ready" if spec.status == "ready" else "not there yet"


# ---- command line
def command_line() -> str:
    """Return the page of subcommands, from their parsers."""
    text = [
        "# Command line\n",
        NOTE,
        (
            "The command is `powertrain`; `python -m powertrain.cli` is the same. `--version` prints the version, "
            "`powertrain COMMAND --help` the arguments of a command.\n"
        ),
        table(("command", "what it does"), [(f"[`{name}`](#{name})", help_) for name, _, help_ in COMMANDS]),
        (
            "Exit status: 0 done, 1 the work failed, 2 the request cannot be met as given (`error: ...` on stderr), "
            "130 interrupted.\n"
        ),
    ]
    for name, path, _ in COMMANDS:
        module = import_module(path)
        parser = argparse.ArgumentParser(prog=f"powertrain {name}")
        module.add_arguments(parser)
        actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
        text += [
            f"## {name}\n",
            f"    {' '.join([parser.prog, *map(_usage, actions)])}\n",
            prose(module.__doc__) + "\n",
        ]
        rows = [(f"`{_word(action)}`", escaped(action.help or "")) for action in actions]
        text.append(table(("argument", "meaning"), rows))
    return "\n".join(text)


def _word(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return name if action.metavar else action.dest
    return action.option_strings[0] + (f" {name}" if action.nargs is None else "")


def _usage(action: argparse.Action) -> str:
    word = _word(action)
    if action.nargs == "*":
        return f"[{word} ...]"
    return f"[{word}]" if action.option_strings or action.nargs == "?" else word


# ---- pages
def pages() -> dict[Path, str]:
    """Return every generated page."""
    registry = own_registry()
    folder = ROOT / "docs" / "reference"
    made = {
        "configuration": configuration(registry),
        "plugins": listing(registry),
        "command-line": command_line(),
        "api": api(),
    }
    return {folder / f"{name}.md": re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" for name, text in made.items()}


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with --check say which are stale; returns the exit status."""
    stale = [path for path, text in pages().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{'stale' if '--check' in arguments else 'wrote'}: {path.relative_to(ROOT)}")
        if "--check" not in arguments:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages()[path], encoding="utf-8")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
