"""`powertrain resume RUN_DIR [key=value ...]`: go on from the last complete checkpoint, in the same folder.

Without a checkpoint the run begins anew. Metrics of steps after the checkpoint are cut off and kept beside. The
configuration is the folder's; words may change what does not alter the past (more steps, deadlines, the layout).
"""

from __future__ import annotations

import argparse
from typing import Final

from powertrain.cli.run import allow_mixed, carry_on, start_again
from powertrain.errors import ConfigError
from powertrain.registry import Registry
from powertrain.run.config import load_config
from powertrain.run.folder import RunFolder

FIXED: Final = ("recipe", "model", "seed", "lora", "name", "runs")
"""Keys that a resumed run keeps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `powertrain resume`."""
    parser.add_argument("folder", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="laid over the run's config.yaml")
    allow_mixed(parser)


def execute(args: argparse.Namespace) -> int:
    """Resume the run; returns the exit status."""
    registry = Registry()
    config = load_config(RunFolder.check(args.folder) / "config.yaml", args.overrides, registry=registry, fixed=FIXED)
    start_again(config, registry)
    with RunFolder.open(args.folder) as folder:
        taken, steps = (folder.latest() or (0,))[0], config.recipe_options.get("steps")
        if steps is not None and steps < taken:
            message = f"'{config.recipe_spec.name}.steps' is {steps}; the run has taken {taken}, give at least {taken}"
            raise ConfigError(message)
        return carry_on(config, folder, registry, resumed=True)
