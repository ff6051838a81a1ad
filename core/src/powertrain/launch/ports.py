"""Free ports that stay reserved until this process ends, also against another experiment on the same host."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import IO, Final

from powertrain.errors import ConfigError

FIRST_PORT: Final = 20000
LAST_PORT: Final = 32000
"""Below the range from which Linux takes ports for outgoing connections, so that none of those takes a reserved one."""
_ATTEMPTS: Final = 2000
_held: list[IO[bytes]] = []


def free_port() -> int:
    """Return a TCP port on which nothing listens; it is never returned again, here or in another driver on this host.

    The reservation is a file lock, held until this process ends however it ends. Ports are drawn from the system's
    randomness: the run's seed must not lead two experiments to the same port. ConfigError when none is found.
    """
    draw = random.SystemRandom()
    folder = Path(tempfile.gettempdir()) / f"powertrain-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for _ in range(_ATTEMPTS):
        port = draw.randint(FIRST_PORT, LAST_PORT)
        if _reserve(folder / str(port)):
            if _unused(port):
                return port
            _held.pop().close()
    message = f"no free port found between {FIRST_PORT} and {LAST_PORT} in {_ATTEMPTS} tries; end what holds them"
    raise ConfigError(message)


def _reserve(file: Path) -> bool:
    stream = file.open("wb")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        return False
    _held.append(stream)
    return True


def _unused(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
