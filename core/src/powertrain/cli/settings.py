"""What somebody meant who wrote a setting as other programs want their options, `--steps 3` for `ppo.steps=3`."""

from __future__ import annotations

from collections.abc import Sequence

from powertrain.registry import Registry
from powertrain.run.options import CORE_OPTIONS, GROUPS


def meant(word: str, arguments: Sequence[str]) -> str:
    """Return the `key=value` word of an option that no command has; arguments: those of the command line.

    A key that stands in a section gets it in front: core's own first, then the recipes'.
    """
    key, equals, value = word.lstrip("-").partition("=")
    if not equals:
        rest = [*arguments[arguments.index(word) + 1 :], "--"] if word in arguments else ["--"]
        value = "true" if rest[0].startswith("--") else rest[0]
    if key not in {option.name for option in CORE_OPTIONS}:
        sections = {**GROUPS, **{name: spec.options for name, spec in Registry().specs("recipe").items()}}
        homes = [name for name, options in sections.items() if key in {option.name for option in options}]
        key = ".".join([*homes[:1], key])
    return f"{key}={value}"
