"""The `hf` engine keeps what core's suites ask of an inference engine."""

from powertrain.testing import InferEngineSuite


class TestHf(InferEngineSuite):
    backend = "hf"
