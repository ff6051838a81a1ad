"""The `vllm` engine keeps what core's suite asks of an inference engine, in this process and as a server."""

from typing import ClassVar

import pytest
from vllm_servers import Attaching

from powertrain.testing import InferEngineSuite


class TestVllm(InferEngineSuite):
    backend = "vllm"
    patience = 40.0
    options: ClassVar = {"enable_lora": True, "max_lora_rank": 8, "max_model_len": 256}


class TestVllmServer(InferEngineSuite):
    """Engines that attach to servers: a new server for each test that changes something would take half an hour."""

    backend = "vllm"
    patience = 150.0
    options: ClassVar = {"form": "server"}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _servers(cls):
        yield
        Attaching.servers.stop()

    def make(self):
        return Attaching()
