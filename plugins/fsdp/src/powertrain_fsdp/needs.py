"""What the engine needs of its environment. Torch-free: it runs on the driver and before a worker's heavy imports."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

logger = logging.getLogger(__name__)
_KEEP_MEMORY: Final = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def environment(options: Mapping[str, Any], spec: Any) -> dict[str, str]:
    """Return the variables that a worker of this backend needs before it starts.

    Ranks that meet on the loopback address talk over the loopback interface; gloo would else look the host's name up,
    which need not resolve. On CPU, glibc keeps freed memory instead of giving it back and
    faulting it in again at every step (a tenth of a step's processor time where it was measured).
    """
    del options
    if sys.platform != "linux":
        return {}
    host = spec.place.rendezvous.rpartition(":")[0]
    needed = {"GLOO_SOCKET_IFNAME": "lo"} if host in {"127.0.0.1", "localhost"} else {}
    return needed | (_KEEP_MEMORY if spec.place.device == "cpu" else {})


def apply(env: Mapping[str, str]) -> None:
    """Set variables that this process lacks. In a worker that powertrain started there are none.

    Once torch is imported, its thread settings have been read: such a variable gets a warning. Variables of
    determinism are judged in `build`, which knows whether it was asked for.
    """
    late = [name for name, value in env.items() if os.environ.get(name) != value]
    os.environ.update({name: env[name] for name in late})
    stale = [name for name in late if name.startswith(("OMP_", "MKL_", "KMP_")) or name == "PYTHONHASHSEED"]
    if stale and "torch" in sys.modules:
        logger.warning("set too late to have an effect in this process: %s", ", ".join(sorted(stale)))
