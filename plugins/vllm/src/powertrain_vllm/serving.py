"""What the two sides of a vLLM server agree on: variables, paths, and names. No torch, no vLLM."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from powertrain.errors import ConfigError

FOLDER: Final = "POWERTRAIN_VLLM_FOLDER"
"""The server's private folder. Where this variable is not set, nothing of ours acts in a vLLM server."""
OWNED: Final = "POWERTRAIN_VLLM_OWNED"
"""Set to 1 where an engine has started the server, which then ends with it and answers nobody without the key."""
KEY: Final = "VLLM_API_KEY"
ROUTES: Final = "/powertrain/"
ALIVE: Final = "alive"
"""File in the folder of an owned server, locked for as long as the engine's process lives."""
EXTENSION: Final = "powertrain_vllm.extension.Extension"
MIDDLEWARE: Final = "powertrain_vllm.middleware.Middleware"
HOW: Final = (
    f"start it with {FOLDER}=<private folder> {KEY}=<key> VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment and "
    f"--worker-extension-cls {EXTENSION} --middleware {MIDDLEWARE} --generation-config vllm, with powertrain-vllm "
    "installed beside it"
)
"""What an attached server needs."""


def private(folder: str) -> Path:
    """Return a folder that only this user can enter, made if it is not there; ConfigError for one that others can."""
    path = Path(folder)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.stat()
    if about.st_uid != os.getuid() or stat.S_IMODE(about.st_mode) & 0o077:
        message = f"{FOLDER}={folder} has mode {stat.S_IMODE(about.st_mode):o} or another owner; it needs 700"
        raise ConfigError(message)
    return path


def id_there(name: str) -> str:
    """Return the id by which vLLM's engine knows the request that was sent with this X-Request-Id."""
    return f"cmpl-{name}-0"
