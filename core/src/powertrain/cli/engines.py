"""`powertrain engines [--check] [--json]`: what is installed, and with `--check`, what of it works.

The plain form reads metadata and imports no plugin; `--check` tries each plugin in a child process and is the only
form that knows roles, axes and capabilities. The exit status is 0 whatever the list says.

JSON: an object with `schema` (1; grows when a key changes its meaning), `powertrain` (version), `api` ([major,
minor] of core), `checked` (bool) and `plugins`, sorted by name, kind and dist. Each plugin has always these keys:
`name`, `kind` (backend, transfer, launcher, recipe, service, device), `group`, `dist`, `version`, `path`, `module`,
`status` (found, duplicate, blocked, hidden; after `--check` also ready, planned, missing, failed), `detail` (one line
or ""), `failure` (a word of `powertrain.registry` or ""), and, null unless checked: `role` ("" where there is
none), `summary`, `axes` (objects of `AxisSpec`), `options` (objects of `OptionSpec`), `capabilities` (name -> full,
partial, none, unknown), `missing` (import names), `install` (a command or ""), `api` ([major, minor] of the plugin).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any, Final

from powertrain import __version__
from powertrain.registry import Registry
from powertrain.specs import API_VERSION

_STATUS: Final = {"planned": "engine not there yet", "missing": "needs packages"}
_UNCHECKED: Final = ("role", "summary", "axes", "options", "capabilities", "missing", "install", "api")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `powertrain engines`."""
    parser.add_argument("--check", action="store_true", help="try each plugin in a child process and say if it works")
    parser.add_argument("--json", action="store_true", help="print stable JSON instead of a table")
    parser.add_argument("--deadline", type=float, default=None, metavar="S", help="seconds for each check (120)")


def execute(args: argparse.Namespace) -> int:
    """Print the list; returns 0."""
    rows = listing(check=args.check, deadline=args.deadline)
    if args.json:
        document = {"schema": 1, "powertrain": __version__, "api": list(API_VERSION), "checked": args.check}
        sys.stdout.write(json.dumps(document | {"plugins": rows}, indent=2, sort_keys=True) + "\n")
    else:
        _show(rows, checked=args.check)
    return 0


def listing(*, check: bool, deadline: float | None = None) -> list[dict[str, Any]]:
    """Return one mapping for each plugin with the keys that the module's docstring lists."""
    infos = Registry().list()
    rows: list[dict[str, Any]] = [
        {**asdict(info), "kind": info.kind, **dict.fromkeys(_UNCHECKED)}
        | {"failure": info.status if info.status in {"duplicate", "blocked"} else ""}
        for info in infos
    ]
    if check:
        from powertrain.registry import check as checks

        for row, result in zip(rows, checks.check(infos, deadline=deadline or checks.DEADLINE), strict=True):
            row.update(result)
    return sorted(rows, key=lambda row: (row["name"], row["kind"], row["dist"]))


def _show(rows: list[dict[str, Any]], *, checked: bool) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    # A pipe or a log has no width of its own; rich would fold the table into 80 columns there.
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    if not rows:
        console.print("no plugin is installed; `pip install powertrain-fsdp powertrain-hf` brings the first engines")
        return
    titles = ["name", "kind", *(["role", "axes", "capabilities"] if checked else []), "dist", "version", "status"]
    table = Table(*(Column(title, overflow="fold") for title in titles), box=None, pad_edge=False)
    for row in rows:
        status = _STATUS.get(row["status"], row["status"])
        cells = row | {"status": status if row["kind"] == "backend" else status.removeprefix("engine ")}
        if checked:
            cells["axes"] = " ".join(axis["name"] for axis in row["axes"])
            cells["capabilities"] = "\n".join(f"{name}: {level}" for name, level in row["capabilities"].items())
        table.add_row(*(cells[title] for title in titles))
    console.print(table)
    for row in rows:
        if row["detail"] and row["status"] != "planned":
            console.print(row["detail"], soft_wrap=True)
    if not checked:
        console.print("`powertrain engines --check` tries each one and shows roles, axes and capabilities")
