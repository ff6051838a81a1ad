"""Variables that libraries read once, when they are imported. No torch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping

_LOG = logging.getLogger(__name__)


def set_early(env: Mapping[str, str], beginnings: tuple[str, ...], library: str) -> None:
    """Set the variables that differ, and warn of those with one of these beginnings if the library has read them."""
    changed = {name: value for name, value in env.items() if os.environ.get(name) != value}
    os.environ.update(changed)
    late = [name for name in changed if name.startswith(beginnings)] if library in sys.modules else []
    if late:
        _LOG.warning("set too late to have an effect in this process: %s", ", ".join(late))
