"""Run tests/test_cuda*.py and write down what it found: outcome, time and facts of each test, on which card.

    python benchmarks/cuda/run.py [benchmarks/results/cuda_h200.json] [pytest's own arguments]

Exit status is pytest's. Without a card the module is skipped and the file says so.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "cuda_h200.json"
PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy", "pytest", "pyzmq", "powertrain")


class Recorder:
    """A pytest plugin that keeps what each test says of itself."""

    def __init__(self):
        self.tests, self.closing = {}, ""

    def pytest_runtest_logreport(self, report):
        """Add up the phases of one test; the first outcome that is no pass stays."""
        test = self.tests.setdefault(report.nodeid.partition("::")[2], {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        test.update(report.user_properties)
        if not report.passed:
            test["outcome"] = report.outcome

    def pytest_terminal_summary(self, terminalreporter):
        """Note the closing line."""
        parts, _ = terminalreporter.build_summary_stats_line()
        self.closing = ", ".join(text for text, _ in parts)


def main():
    """Run the tests and write the file."""
    words = sys.argv[1:]
    target = Path(words.pop(0)) if words and words[0].endswith(".json") else RESULT
    recorder, begun = Recorder(), datetime.datetime.now(datetime.UTC)
    status = pytest.main(
        ["-rs", "--durations=0", *map(str, sorted((ROOT / "tests").glob("test_cuda*.py"))), *words], plugins=[recorder]
    )
    seconds = (datetime.datetime.now(datetime.UTC) - begun).total_seconds()
    has_card = torch.cuda.is_available()
    result = {
        "date": f"{begun:%Y-%m-%d}",
        "commit": os.environ.get("COMMIT", ""),
        "device": torch.cuda.get_device_name(0) if has_card else "none",
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_card else "",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "closing_line": f"{recorder.closing} in {seconds:.1f}s",
        "tests": recorder.tests,
    }
    target.write_text(json.dumps(result, indent=1) + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
