"""The conformance suite: behaviour that every engine, transfer and launcher owes, as tests that a plugin inherits.

    from powertrain.testing import InferEngineSuite

    class TestEcho(InferEngineSuite):
        backend = "echo"

That is a whole test module. Capabilities are taken from the plugin's spec, which the registry finds by the name.
See `powertrain.testing.suite` for what a stub may set and how it departs from a test with a stated reason.
Needs pytest; the suites of engines and transfers need `powertrain[torch]` for their reference.
"""

from __future__ import annotations

try:
    import pytest  # noqa: F401 - only to say what to install
except ModuleNotFoundError as exc:
    message = "powertrain.testing needs pytest, not installed here; way out: pip install 'powertrain[testing]'"
    raise ModuleNotFoundError(message, name="pytest") from exc

from powertrain.testing.asserts import SUITES as SUITES
from powertrain.testing.infer import InferEngineSuite as InferEngineSuite
from powertrain.testing.launcher import LauncherSuite as LauncherSuite
from powertrain.testing.sink import WeightSinkSuite as WeightSinkSuite
from powertrain.testing.source import WeightSourceSuite as WeightSourceSuite
from powertrain.testing.suite import departs as departs
from powertrain.testing.train import TrainEngineSuite as TrainEngineSuite
from powertrain.testing.transfer import TransferSuite as TransferSuite
