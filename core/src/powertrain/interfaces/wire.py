"""The records that may cross a process border. Only classes marked here are ever rebuilt from a message."""

from __future__ import annotations

from typing import Final, TypeVar

T = TypeVar("T", bound=type)

WIRE_TYPES: Final[dict[str, type]] = {}
"""Class name -> dataclass; the control channel refuses every other name."""


def wire(cls: T) -> T:
    """Allow a dataclass on the control channel (decorator). Names must be unique."""
    assert WIRE_TYPES.get(cls.__name__, cls).__qualname__ == cls.__qualname__, cls
    WIRE_TYPES[cls.__name__] = cls
    return cls
