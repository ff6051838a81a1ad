"""A vLLM server that an engine starts, and that ends with it: its command, its environment, its processes."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from powertrain.errors import ConfigError, PowertrainError, WorkerError
from powertrain.interfaces.launcher import ProcessSpec
from powertrain.launch.local import LocalLauncher
from powertrain.launch.ports import free_port
from powertrain_vllm.environment import environment
from powertrain_vllm.serving import ALIVE, EXTENSION, FOLDER, KEY, MIDDLEWARE, OWNED

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec

logger = logging.getLogger(__name__)
MODULE: Final = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs; the command itself asks for metadata that a CPU build does not have."""
NAME: Final = "vllm-server"
START_SECONDS: Final = 900.0
GRACE_SECONDS: Final = 8.0
SECRET: Final = {"hf_token": "HF_TOKEN"}
"""Arguments that go into the environment, since a command line can be read by every user of the host."""
REFUSED: Final = re.compile(r"(?:Value error, |api_server\.py: error: )(.*)")
"""What vLLM says of an argument, by pydantic or argparse."""
TOLD_BYTES: Final = 32 << 10


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as they stand on vLLM's command line."""
    found = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None or value == {} or name in SECRET:
            continue
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, tuple)):
            found += [f"--{flag}", *map(str, value)]
        else:
            found.append(f"--{flag}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return found


class Launched:
    """One server on a port of 127.0.0.1. folder: private to this user, gone after `close`. key: its API key."""

    def __init__(self, spec: EngineSpec, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        self.key = secrets.token_hex(24)
        self.url = f"http://127.0.0.1:{free_port()}"
        self.folder = Path(tempfile.mkdtemp(prefix="powertrain-vllm-"))
        self._alive: IO[bytes] = (self.folder / ALIVE).open("wb")
        fcntl.flock(self._alive, fcntl.LOCK_EX)
        self._launcher = LocalLauncher({"grace": GRACE_SECONDS}, logs=str(self.folder))
        self._seconds = max(START_SECONDS, spec.timeout)
        port = self.url.rpartition(":")[2]
        argv = (
            *(sys.executable, "-m", MODULE, "--host=127.0.0.1", f"--port={port}"),
            *("--disable-uvicorn-access-log", "--disable-fastapi-docs"),
            *(f"--worker-extension-cls={EXTENSION}", f"--middleware={MIDDLEWARE}"),
            *flags(arguments),
        )
        self._process = ProcessSpec(
            name=NAME, argv=argv, env=self._environment(spec, options, arguments), ready=f"{self.url}/health"
        )

    def _environment(
        self, spec: EngineSpec, options: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> dict[str, str]:
        found = {**environment(options, spec), **os.environ, "PYTHONUNBUFFERED": "1"}
        found |= {FOLDER: str(self.folder), OWNED: "1", KEY: self.key}
        if arguments.get("enable_lora"):
            found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if "VLLM_PLUGINS" in found:  # a list of those that are loaded
            found["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*found["VLLM_PLUGINS"].split(","), "powertrain"]))
        found |= {SECRET[name]: str(value) for name, value in arguments.items() if name in SECRET and value}
        return found

    def start(self) -> None:
        """Start and wait until it answers.

        ConfigError for arguments that vLLM refuses, WorkerError when it ends for another reason, DeadlineError.
        """
        try:
            self._launcher.start([self._process])
            self._launcher.wait_ready([NAME], deadline=self._seconds)
        except PowertrainError as exc:
            log = self.log()
            logger.error("vLLM's server did not start; the end of its log:\n%s", log)
            refused = REFUSED.findall(log) if isinstance(exc, WorkerError) else ()
            if refused:
                message = f"vLLM's server does not start with these arguments: {refused[-1]}"
                raise ConfigError(message) from exc
            raise

    @property
    def code(self) -> int | None:
        """Exit status; None while it runs, or was not started."""
        found = self._launcher.status()
        return found[0].code if found else None

    @staticmethod
    def how(code: int) -> str:
        """Return how a server ended."""
        return f"ended with {f'signal {-code}' if code < 0 else f'status {code}'}"

    @property
    def pid(self) -> int:
        """Process of the API server; 0 before the start."""
        found = self._launcher.status()
        return found[0].pid if found else 0

    def log(self) -> str:
        """Return the end of what the server wrote."""
        path = self.folder / f"{NAME}.log"
        if not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TOLD_BYTES))
            return file.read().decode(errors="replace").replace(self.key, "<key>")

    def kill(self) -> None:
        """End all its processes at once."""
        if self._launcher.status():
            self._launcher.stop([NAME], grace=0.0)

    def close(self) -> None:
        """End all its processes and remove the folder. May be called twice."""
        self._launcher.close()
        self._alive.close()
        shutil.rmtree(self.folder, ignore_errors=True)
