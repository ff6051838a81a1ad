"""vLLM servers for tests, started as a user starts one to attach to, and engines that attach to them.

A start takes some 20 s, so servers are kept; an engine that attaches gets one whose weights are the model's again.
"""

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field, replace

from powertrain.interfaces.launcher import ProcessSpec
from powertrain.interfaces.weights import Piece
from powertrain.launch.local import LocalLauncher
from powertrain.launch.ports import free_port
from powertrain.weights import Update, WeightVersion
from powertrain_vllm.engine import VllmEngine
from powertrain_vllm.launched import flags
from powertrain_vllm.serving import EXTENSION, FOLDER, MIDDLEWARE

KEY_NAME, KEY = "POWERTRAIN_TEST_KEY", "a-key-for-tests-0123456789"
HEAD = '{"head_dtype": "float32"}'
MOST = 2
START_SECONDS = 240.0


def command(model, port, *more, dtype="float32", fp32=True):
    """Return the command line that the documentation gives, for a small model on a CPU."""
    arguments = {
        "model": model,
        "dtype": dtype,
        "max_model_len": 256,
        "enforce_eager": True,
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 4,
        "max_cpu_loras": 4,
        "generation_config": "vllm",
        "skip_tokenizer_init": True,
        "hf_overrides": HEAD if fp32 else None,
    }
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={port}"]
    return (*argv, *flags(arguments), *more)


OURS = (f"--worker-extension-cls={EXTENSION}", f"--middleware={MIDDLEWARE}")


@dataclass
class Running:
    """A server that runs. folder: its private one."""

    url: str
    folder: str
    launcher: LocalLauncher
    user: object = field(default=None, repr=False)

    @classmethod
    def start(cls, model, *more, key=KEY, **what):
        """Start one and wait until it answers. more: arguments; by default those that an engine needs."""
        folder = tempfile.mkdtemp(prefix="powertrain-test-vllm-")
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        env = {**os.environ, FOLDER: folder, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        if key:
            env["VLLM_API_KEY"] = key
        launcher = LocalLauncher({"grace": 5.0}, logs=folder)
        argv = command(model, port, *(more or OURS), **what)
        launcher.start([ProcessSpec(name="server", argv=argv, env=env, ready=f"{url}/health")])
        try:
            launcher.wait_ready(["server"], deadline=START_SECONDS)
        except BaseException:
            launcher.close()
            raise
        return cls(url, folder, launcher)

    @property
    def alive(self):
        """Whether its process still runs."""
        return self.launcher.status()[0].code is None

    def stop(self):
        """End it."""
        self.launcher.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Servers:
    """The servers of a test session, by what they run; at most `MOST` at once."""

    def __init__(self):
        self._all = []

    def free(self, **what):
        """Return one that nobody uses."""
        for key, server in list(self._all):
            if not server.alive:
                self._all.remove((key, server))
        found = next((server for key, server in self._all if key == what and server.user is None), None)
        if found is None:
            for key, server in list(self._all):
                if server.user is None and len(self._all) >= MOST:
                    server.stop()
                    self._all.remove((key, server))
            found = Running.start(**what)
            self._all.append((dict(what), found))
        return found

    def stop(self):
        """End all."""
        while self._all:
            self._all.pop()[1].stop()


class Attaching(VllmEngine):
    """Attaches to a server of `servers` whatever its spec's options, and finds the model's weights there."""

    servers = Servers()

    def __init__(self):
        super().__init__()
        self.server = None

    async def build(self, spec):
        """Attach, and write the weights that the engine before has changed."""
        os.environ[KEY_NAME] = KEY
        self.server = self.servers.free(model=spec.model, dtype=spec.dtype, fp32=spec.head.fp32)
        self.server.user = self
        options = {"form": "server", "url": self.server.url, "api_key_env": KEY_NAME}
        await super().build(replace(spec, options=options))
        sink = self._sink
        if sink.version != "0.0" or sink.state != "steady":
            paused, sink._paused = sink._paused, lambda: True  # nothing runs here yet
            restore(sink, spec.model)
            sink._paused = paused

    async def close(self):
        """Detach."""
        await super().close()
        if self.server is not None:
            self.server.user = None


def restore(sink, folder):
    """Write a checkpoint under version 0.0, which is that of weights that no run has touched."""
    from powertrain.testing.tensors.models import checkpoint

    tensors = checkpoint(folder)
    sink.begin(Update(version=WeightVersion(0, 0)))
    sink.apply([Piece(entry.name, (0,) * len(entry.shape), tensors[entry.name]) for entry in sink.manifest()])
    sink.finish()
    sink.publish("0.0")
