"""A number in shared memory by which one process tells another that it may go on, without a message of the driver's.

The trainer's rank posts the number of the update whose weights are complete in memory; an inference rank that has been
told to load waits for it. So both can be told at once, and an update takes one round trip.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from powertrain.errors import DeadlineError, TransferError
from powertrain.tensors.area import Area, default_folder

_PAUSE: Final = 5e-5
"""Seconds between two looks: a wait is as long as a device synchronise, a few of these."""


class Turn:
    """The number, in a page of its own. Made by the rank that posts, attached by those that wait."""

    def __init__(self, area: Area) -> None:
        self._area = area
        self._number: torch.Tensor | None = area.words()

    @classmethod
    def make(cls, session: str, rank: int) -> Turn:
        """Make a page under a name of its own, at number 0."""
        return cls(Area.create(default_folder(), f"{session}-turn{rank}-{os.urandom(4).hex()}", Area.PAGE, 1))

    @classmethod
    def attach(cls, path: str) -> Turn:
        """Map the page that another rank has made."""
        return cls(Area.attach(Path(path), Area.PAGE, 1))

    @property
    def path(self) -> str:
        """Where the page lies, until `settle`."""
        return str(self._area.path)

    @property
    def number(self) -> int:
        """What was posted last."""
        assert self._number is not None
        return int(self._number[0])

    def post(self, number: int) -> None:
        """Let those go on that wait for `number`; its negative makes them give up."""
        assert self._number is not None
        self._number[0] = number

    def settle(self) -> None:
        """Take the page's name away; called by its maker once all have it attached."""
        self._area.unlink()

    def close(self) -> None:
        """Unmap; may be called twice."""
        self._number = None
        self._area.unlink()
        self._area.close()


def await_turn(turns: Iterable[tuple[int, Turn]], number: int, *, seconds: float) -> None:
    """Return once every trainer rank has posted `number`; turns: (rank, its turn).

    DeadlineError naming the rank after `seconds`; TransferError where a rank says that its weights have moved.
    """
    end = time.monotonic() + seconds
    for rank, turn in turns:
        while abs(turn.number) < number:
            if time.monotonic() > end:
                what = f"update {number} of trainer rank {rank} to be complete in memory"
                message = f"waited {seconds:g} s for {what}; it has died or is stuck"
                raise DeadlineError(message, who=f"trainer rank {rank}", what=what, seconds=seconds)
            time.sleep(_PAUSE)
        if turn.number < 0:
            message = (
                f"the weights of trainer rank {rank} have moved since they were offered; the next update maps them"
            )
            raise TransferError(message, phase="gather")
