"""The `vllm` engine, in this process, keeps what core's suite asks of an inference engine."""

from typing import ClassVar

from powertrain.testing import InferEngineSuite


class TestVllm(InferEngineSuite):
    backend = "vllm"
    patience = 40.0
    options: ClassVar = {"enable_lora": True, "max_lora_rank": 8, "max_model_len": 256}
