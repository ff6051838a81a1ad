"""How far every rank of a transfer over shared memory is, told in that memory, and the waits for one another.

A rank that fails, and the driver when a call fails or is cancelled, say stop: whoever waits then ends at once, without
an error of its own, so that the error that is told is the cause.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from powertrain.errors import DeadlineError

_PAUSE: Final = 5e-5
"""Seconds between two looks; there are more slots than one, so whoever is slower does not wait at all."""


class Stopped(Exception):
    """Another rank has failed, or the update was given up: no error of its own; who met the cause tells it."""


_LOCK: Final = threading.Lock()


def _barrier() -> None:
    """Keep the order of memory accesses before and after it, as other processes see them.

    A processor of weak order (ARM) may let a plain store be seen before those ahead of it: a number before the data
    that it speaks of. Letting go of a lock keeps what is ahead of it there, and taking one what follows, so the pair
    between two rounds holds both.
    """
    for _ in range(2):
        with _LOCK:
            pass


class Ledger:
    """A line for each rank: how many buckets it is done with, and whether it waits; and a line before them for stop.

    lines: int64 in shared memory, 1 + ranks lines of a cache. names: of all ranks, for errors.
    """

    def __init__(self, lines: torch.Tensor, names: Sequence[str]) -> None:
        self._numbers, self._waits, self._names = lines[:, 0], lines[:, 1], names

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self._names)

    @property
    def stopped(self) -> bool:
        """True once somebody has said stop."""
        return bool(self._numbers[0])

    def stop(self) -> None:
        """Let everybody end who waits."""
        self._numbers[0] = 1

    def post(self, rank: int, number: int) -> None:
        """Say that a rank is done with so many buckets; what it has copied is complete in memory."""
        _barrier()
        self._numbers[1 + rank] = number

    def look(self, rank: int, begun: float, end: float) -> None:
        """Raise Stopped when somebody has said stop, DeadlineError past the end of what began then (monotonic)."""
        if self.stopped:
            raise Stopped
        now = time.monotonic()
        if now > end:
            who, what = self._names[rank], "read the trainer's memory"
            message = f"{who} has taken {now - begun:.1f} s to {what} and is not done; raise the deadline of updates"
            raise DeadlineError(message, who=who, what=what, seconds=now - begun)

    def wait(self, rank: int, others: Sequence[int], number: int, what: str, end: float) -> bool:
        """Return True once all others are done with `number` buckets, False when somebody has said stop.

        rank: who waits. what: for what, as the error says it. end: on the monotonic clock; then DeadlineError that
        names the first rank that is late.
        """
        begun, ahead = time.monotonic(), list(others)
        self._waits[1 + rank] = 1
        while not self.stopped:
            ahead = [other for other in ahead if int(self._numbers[1 + other]) < number]
            if not ahead:
                self._waits[1 + rank] = 0
                _barrier()
                return True
            now = time.monotonic()
            if now > end:
                who = self._names[self._cause(ahead)]
                waited = f"{self._names[rank]} waited {now - begun:.1f} s for {self._names[ahead[0]]} to {what}"
                message = f"{waited}; {who} is stopped, dead or stuck"
                raise DeadlineError(message, who=who, what=what, seconds=now - begun)
            time.sleep(_PAUSE)
        return False

    def _cause(self, late: Sequence[int]) -> int:
        """Return the rank that all wait for, since a late one may itself wait for somebody.

        It is the first that does not wait, of the late ones or else of all that are behind.
        """
        numbers, waits = self._numbers[1:].tolist(), self._waits[1:].tolist()
        behind = [rank for rank, number in enumerate(numbers) if number < max(numbers)]
        return next((rank for rank in (*late, *behind) if not waits[rank]), late[0])

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Say stop where the body raises."""
        try:
            yield
        except BaseException:
            self.stop()
            raise
