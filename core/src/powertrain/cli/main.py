"""The command `powertrain`: one table of subcommands, each a module that is imported when it is called.

A subcommand's module has `add_arguments(parser)` and `execute(args) -> int`, the exit status. Statuses: 0 done,
1 the work failed, 2 the request cannot be met as given (one block `error: ...` on stderr), 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from powertrain import __version__
from powertrain.errors import ConfigError, PowertrainError
from powertrain.options import nearest

COMMANDS: Final = (
    ("run", "powertrain.cli.run", "run a recipe file"),
    ("resume", "powertrain.cli.resume", "go on with a run from its folder"),
    ("engines", "powertrain.cli.engines", "list what is installed: backends, transfers, launchers, recipes"),
    ("explain", "powertrain.cli.explain", "say what a config string means"),
    ("plan", "powertrain.cli.plan", "say what an update of the weights will move, and how fast it can be"),
)
"""Name, module and one line of help of every subcommand."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status; argv: the arguments, the process's own when None."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except SystemExit as exc:  # argparse: 0 after --help and --version, 2 after a usage error
        return exc.code if isinstance(exc.code, int) else 1
    except PowertrainError as exc:
        sys.stdout.flush()
        sys.stderr.write(f"error: {exc}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader (`| head`) has gone; keep the interpreter's own flush at exit from complaining about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="powertrain", description="RL post-training with engines picked by one line.")
    parser.add_argument("--version", action="version", version=f"powertrain {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    called = next((word for word in arguments if not word.startswith("-")), None)
    for name, path, text in COMMANDS:
        command = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        if name == called:
            module = import_module(path)
            module.add_arguments(command)
            command.set_defaults(execute=module.execute)
    names = [name for name, _, _ in COMMANDS]
    if called is not None and called not in names:
        message = f"no command {called!r}{nearest(called, names)}; there are: {', '.join(names)}"
        raise ConfigError(message)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        options = [name.lstrip("-") for name in commands.choices[str(called)]._option_string_actions]
        hint = nearest(unknown[0].strip("-"), options).replace("'", "'--", 1)
        if "overrides" in args and not hint:
            from powertrain.cli.settings import meant

            hint = f"; settings are words without dashes, such as {meant(unknown[0], arguments)!r}"
        message = f"no option {unknown[0]!r}{hint}; `powertrain {called} --help` lists what there is"
        raise ConfigError(message)
    return int(args.execute(args))
