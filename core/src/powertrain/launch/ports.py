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
_held: list[IO[bytes]] = []


def free_port() -> int:
    """Return a TCP port on which nothing listens; it is never returned again, here or in another driver on this host.

    The reservation is a file lock, held until this process ends however it ends. Ports are drawn from the system's
    randomness: the run's seed must not lead two experiments to the same port. ConfigError when none is found.
    """
    ports = range(FIRST_PORT, LAST_PORT + 1)
    folder = Path(tempfile.gettempdir()) / f"powertrain-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for port in random.SystemRandom().sample(ports, len(ports)):
        lock = (folder / str(port)).open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:  # reserved by a driver, or in use
            lock.close()
            continue
        _held.append(lock)
        return port
    message = f"no free port found between {FIRST_PORT} and {LAST_PORT}; end what holds them"
    raise ConfigError(message)
