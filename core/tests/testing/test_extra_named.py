"""The suites without what they need."""

import subprocess
import sys


def test_missing_pytest_is_told_with_the_extra_that_brings_it():
    code = "import sys; sys.modules['pytest'] = None; import powertrain.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: powertrain.testing needs pytest, not installed here; way out: ")
    assert last.endswith("pip install 'powertrain[testing]'")
