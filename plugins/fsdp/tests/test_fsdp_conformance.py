"""The `fsdp` engine keeps what core's suites ask of a training engine."""

from powertrain.testing import TrainEngineSuite


class TestFsdp(TrainEngineSuite):
    backend = "fsdp"
    splits = ({"microbatch_tokens": 8}, {"packing": "padded"}, {"packing": "packed"}, {"shard": "always"})
