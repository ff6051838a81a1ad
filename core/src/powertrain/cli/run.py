"""`powertrain run RECIPE.yaml key=value ... [--dry-run]`: one run from a recipe file, in a folder of its own.

`key=value` lays YAML-typed values over the file, dotted keys reach inside (`optim.lr=1e-4`). `--dry-run` prints the
resolved configuration as YAML, then where every rank goes, as comments; it starts nothing and makes no folder.

Variables such as PYTHONHASHSEED act only when an interpreter starts. Where an engine lives in this process, the
command therefore starts itself again, once, in the environment that `powertrain.env.build_environment` gives; the
variable POWERTRAIN_STARTED_AGAIN marks the second start. Exit statuses are those of `powertrain.cli.main`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any, Final

from powertrain.errors import ConfigError, PowertrainError
from powertrain.registry import Registry
from powertrain.run.config import RunConfig, load_config
from powertrain.run.context import RunContext, carry_out, checked_recipe, describe, inline_environment
from powertrain.run.folder import RunFolder

AGAIN: Final = "POWERTRAIN_STARTED_AGAIN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `powertrain run`."""
    parser.add_argument("recipe", metavar="RECIPE.yaml", help="recipe file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="laid over it; a.b=c is nested")
    parser.add_argument("--dry-run", action="store_true", help="print configuration and placement, start nothing")
    parser.add_argument("--folder", metavar="RUN_DIR", help="the run's folder, new; made below `runs` if not given")
    allow_mixed(parser)


def allow_mixed(parser: argparse.ArgumentParser) -> None:
    """Let options stand between `key=value` words too; argparse by itself takes such words in one row only."""
    plain = parser.parse_known_args

    def parse(args: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = plain  # type: ignore[method-assign]
        return parser.parse_known_intermixed_args(args, namespace)

    parser.parse_known_args = parse  # type: ignore[method-assign]


def execute(args: argparse.Namespace) -> int:
    """Run the recipe file; returns the exit status."""
    registry = Registry()
    config = load_config(args.recipe, args.overrides, registry=registry)
    RunFolder.place(os.path.dirname(args.folder or "") or ("." if args.folder else config["runs"]), config["name"])  # noqa: PTH120
    if args.dry_run:
        placement = describe(config, registry)
        checked_recipe(RunContext(config, None, registry))
        sys.stdout.write(f"{config.dump()}\n{placement}")
        return 0
    start_again(config, registry)
    try:
        folder = RunFolder.make(args.folder) if args.folder else RunFolder.create(config["runs"], config["name"])
    except FileExistsError as exc:
        message = f"{args.folder!r} is there already; `powertrain resume {args.folder}` goes on with a run"
        raise ConfigError(message) from exc
    return carry_on(config, folder, registry, resumed=False)


def start_again(config: RunConfig, registry: Registry) -> None:
    """Replace this process by itself in the environment that inline engines need; returns where none is needed.

    Called before anything is made. An environment that is right already is not made again.
    """
    if os.environ.pop(AGAIN, None) or sys.argv[1:2] not in (["run"], ["resume"]):
        return  # started again already, or `main` was called from another program, which is not ours to replace
    wanted = inline_environment(config, registry, os.environ)
    if wanted is None or wanted == dict(os.environ):
        return
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**wanted, AGAIN: "1"})


def _interrupt(*_: object) -> None:
    """Do what Ctrl-C does, also in a process that a shell has made ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def carry_on(config: RunConfig, folder: RunFolder, registry: Registry, *, resumed: bool) -> int:
    """Carry a run out in its folder; Ctrl-C and SIGTERM close all engines; all ends say how to go on."""
    # Progress bars of the libraries inside the engines would tear the run's own display; read when they are imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Loading libraries and weights takes a while, in which there is nothing else to see.
    sys.stdout.write(f"starting {config['engines']} in {folder.path}\n")
    sys.stdout.flush()
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        carry_out(config, folder, registry=registry, resumed=resumed)
    except KeyboardInterrupt:
        told, status = "\ninterrupted, all engines are closed", 130
    except PowertrainError as exc:
        if not folder.begun:
            raise  # refused before anything began
        with suppress(OSError), (folder.logs / "driver.log").open("a", encoding="utf-8") as log:  # the disk may be full
            log.write(traceback.format_exc())
        told, status = f"error: {exc}\nthe run has stopped; traces are in {folder.logs}", 1
    else:
        return 0
    finally:
        signal.signal(signal.SIGTERM, before)
    if folder.config_file.is_file():
        saved = any(folder.checkpoints.glob("step-*"))
        where = "goes on from the last checkpoint" if saved else "begins it anew, since no checkpoint was saved yet"
        told += f"; `powertrain resume {folder.path}` {where}"
    sys.stdout.flush()
    sys.stderr.write(f"{told}\n")
    return status
