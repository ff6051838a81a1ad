"""A pytest run within a test: what each test of each class in a file came to."""

import contextlib
import io
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

PLAIN = ["-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:timeout", "-p", "no:hypothesispytest", "--noconftest"]


class Recorder:
    """Notes outcomes and reasons by class and test, parameters left out."""

    def __init__(self):
        self.outcomes, self.reasons, self.text = {}, {}, ""

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        _, owner, test = report.nodeid.split("::")
        test = test.partition("[")[0]
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        self.outcomes.setdefault(owner, {}).setdefault(test, []).append(outcome)
        if report.longrepr:
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons.setdefault(owner, {})[test] = text

    def failed(self, owner):
        return {test for test, outcomes in self.outcomes.get(owner, {}).items() if "failed" in outcomes}


def run(file, *arguments):
    """Run a file by itself, without this repository's configuration; returns a recorder with what was printed."""
    recorder, output = Recorder(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(output):
        ini = Path(folder, "pytest.ini")
        ini.write_text("[pytest]\nxfail_strict = true\n")  # more file patterns would have asserts of torch rewritten
        where = ["-c", str(ini), "--rootdir", folder, "--import-mode=importlib"]
        pytest.main([*PLAIN, *where, *arguments, str(file)], plugins=[recorder])
    recorder.text = output.getvalue()
    return recorder


def start(file, report):
    """Begin a run in a process of its own, which writes `report`."""
    return subprocess.Popen([sys.executable, __file__, str(file), str(report)])


def finished(process, report, seconds):
    """Wait for a run that was started and return its recorder."""
    try:
        process.wait(seconds)
    finally:
        process.kill()
    recorder = Recorder()
    vars(recorder).update(json.loads(Path(report).read_text()))
    return recorder


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(vars(run(sys.argv[1]))))
