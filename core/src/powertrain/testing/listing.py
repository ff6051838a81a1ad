"""The list of all tests of the suites as markdown: `python -m powertrain.testing.listing PAGE` renews it in a page."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from powertrain import testing
from powertrain.testing.suite import Suite

SUITES: Final[Sequence[type[Suite]]] = (
    testing.TrainEngineSuite,
    testing.InferEngineSuite,
    testing.TransferSuite,
    testing.LauncherSuite,
)
BEGIN: Final = "<!-- tests: made by `python -m powertrain.testing.listing` -->"
END: Final = "<!-- end of tests -->"


def tests_of(suite: type[Suite]) -> dict[str, str]:
    """Return test -> docstring, in the order in which the modules have them, the suite's nearest module last."""
    found: dict[str, str] = {}
    for base in reversed(suite.__mro__):
        for name, member in vars(base).items():
            if name.startswith("test_"):
                found[name] = inspect.getdoc(member) or ""
    return found


def listing() -> str:
    """Return the tests of every suite: what must hold, the capability that it hangs on, what a failure means."""
    parts = []
    for suite in SUITES:
        parts.append(f"### {suite.__name__}\n\n| test | capability | a failure means |\n|---|---|---|")
        for name, text in tests_of(suite).items():
            needed = ", ".join(f"`{one}`" for one in getattr(getattr(suite, name), "needs", ()))
            parts.append(f"| {name.removeprefix('test_').replace('_', ' ')} | {needed} | {_cell(text)} |")
        parts.append("")
    return "\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def renewed(page: str) -> str:
    """Return a page with the list between its two markers made anew."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n\n{listing()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        Path(argument).write_text(renewed(Path(argument).read_text(encoding="utf-8")), encoding="utf-8")
