"""What every test of the repository starts from, and what a whole run (`make test`, option --whole) promises.

A whole run fails when a file of tests/promises.toml ran no test, so that an engine that cannot be imported never looks
like one that works, and when a test was skipped for a reason that tests/skips.toml does not list. By hand, with single
files or tests, nothing of this applies.
"""

from __future__ import annotations

import json
import os
import signal
import time
import tomllib
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

# A shell that starts this in the background makes it ignore Ctrl-C; every process that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

KINDS = ("failed", "error", "passed", "skipped", "xfailed", "xpassed")
"""How tests end, as a closing line counts them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare what `make test` passes."""
    group = parser.getgroup("powertrain")
    group.addoption("--whole", action="store_true", help="hold the run to tests/promises.toml and tests/skips.toml")
    group.addoption("--started", type=float, metavar="EPOCH", help="when the work began, environment and lint included")
    group.addoption("--tally", type=Path, metavar="FILE", help="where a whole run writes how many tests ended how")


def pytest_configure(config: pytest.Config) -> None:
    """Watch a whole run; `-k` and the like by hand are not whole."""
    if config.getoption("--whole") and not hasattr(config, "workerinput"):  # of pytest-xdist, whose controller judges
        config.pluginmanager.register(WholeRun(config), "powertrain-whole-run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each test's report name the engines of its marker `engine`."""
    for item in items:
        names = {str(name) for mark in item.iter_markers("engine") for name in mark.args}
        item.user_properties += [("engine", name) for name in sorted(names)]


class WholeRun:
    """Counts what ran and what was skipped, and judges both at the end."""

    def __init__(self, config: pytest.Config) -> None:
        folder = Path(config.rootpath) / "tests"
        promises = tomllib.loads((folder / "promises.toml").read_text(encoding="utf-8"))
        environment = os.environ.get("POWERTRAIN_TEST_ENVIRONMENT", "dev")
        self.engines: dict[str, list[str]] = promises["environments"][environment]["engines"]
        self.budget: dict[str, Any] = promises["environments"][environment].get("budget", {})
        self.listed: list[dict[str, str]] = tomllib.loads((folder / "skips.toml").read_text(encoding="utf-8"))["skip"]
        self.listed = [row for row in self.listed if environment in row.get("environments", ["dev"])]
        self.tally: Path | None = config.getoption("--tally")
        self.begun = time.time()
        self.started: float = config.getoption("--started") or self.begun
        self.ran: Counter[str] = Counter()
        self.marked: Counter[str] = Counter()
        self.skipped: list[tuple[str, str]] = []

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test that ran, or note one that was skipped."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skip(report)
        elif report.when == "call" and not report.skipped:
            self.ran[report.nodeid.partition("::")[0]] += 1
            self.marked.update(value for key, value in report.user_properties if key == "engine")

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that was skipped as a whole."""
        if report.skipped:
            self._skip(report)

    def _skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skip = report.nodeid, reason.removeprefix("Skipped: ")
        if skip not in self.skipped:  # each process of pytest-xdist collects a skipped module
            self.skipped.append(skip)

    def _entry(self, test: str, reason: str) -> dict[str, str] | None:
        fits = (row for row in self.listed if fnmatchcase(test, row["test"]) and fnmatchcase(reason, row["reason"]))
        return next(fits, None)

    def problems(self) -> list[str]:
        """Return a sentence for everything that makes the run fail."""
        found = []
        for engine, files in self.engines.items():
            idle = [file for file in files if not self.ran[file]]
            if idle or not (files or self.marked[engine]):
                where = ", ".join(idle) or f"no test marked engine({engine!r})"
                found.append(f"{engine} is promised (tests/promises.toml) and ran no test of: {where}")
        unlisted = [(test, reason) for test, reason in self.skipped if self._entry(test, reason) is None]
        found += [f"{test} was skipped, which tests/skips.toml does not list: {reason}" for test, reason in unlisted]
        return found

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail a run that did not keep its promises."""
        if exitstatus == pytest.ExitCode.OK and self.problems():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print promises, skips with their reasons, stale entries and the time taken."""
        write = terminalreporter.write_line
        terminalreporter.section("whole run")
        for engine, files in self.engines.items():
            write(f"{engine}: {sum(self.ran[file] for file in files) or self.marked[engine]} tests ran")
        rows = [(self._entry(test, reason), reason) for test, reason in self.skipped]
        counts = Counter((row["why"], reason) for row, reason in rows if row)
        for (why, reason), count in counts.items():
            write(f"skipped {count}: {reason} ({why})")
        for row in self.listed:
            if row not in [used for used, _ in rows]:
                write(f"tests/skips.toml: nothing was skipped for {row['test']} ({row['reason']})")
        for problem in self.problems():
            write(f"FAILED {problem}", red=True)
        if self.tally:
            ends = {kind: len(terminalreporter.stats.get(kind, ())) for kind in KINDS}
            self.tally.write_text(json.dumps({**ends, "failed": ends["failed"] + len(self.problems())}))
        if self.budget:
            now = time.time()
            spent, limit = now - self.started, self.budget["seconds"]
            over = "" if spent <= limit else f": {spent - limit:.0f} s over"
            write(f"{spent:.0f} s of {limit} s for {self.budget['what']}, tests {now - self.begun:.0f} s{over}")
