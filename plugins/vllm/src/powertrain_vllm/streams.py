"""Answers token by token, while their requests run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from powertrain.errors import StateError

if TYPE_CHECKING:
    from powertrain.interfaces.data import GenerateRequest, GenerateResult
    from powertrain.tensors.rows import Row


@dataclass(frozen=True, slots=True)
class Fresh:
    """A token that was just drawn. sample: index among the request's n. place: index in its completion.

    logprob, logprob_t1, version: as in `Completion`, version the one of the token's segment.
    """

    sample: int
    place: int
    token: int
    logprob: float
    logprob_t1: float
    version: str


class Streams:
    """Who listens to which request."""

    def __init__(self) -> None:
        self._queues: dict[str, asyncio.Queue[Fresh]] = {}

    def tell(self, row: Row) -> None:
        """Hand on the token that a row took last."""
        queue = self._queues.get(row.request.request_id)
        if queue is not None:
            place = len(row.tokens) - 1
            last = row.tokens[-1], row.logprobs[-1], row.logprobs_t1[-1]
            queue.put_nowait(Fresh(row.sample, place, *last, row.cuts[-1][1]))

    async def run(
        self, request: GenerateRequest, generate: Callable[[GenerateRequest], Awaitable[GenerateResult]]
    ) -> AsyncIterator[Fresh]:
        """Yield a request's tokens as they come; raises what `generate` raises, ends with it, and with its reader.

        An iterator that is closed before its end aborts the request.
        """
        name = request.request_id
        if name in self._queues:  # it would take the other's tokens, and its queue with it
            message = f"request id {name!r} is in flight already"
            raise StateError(message)
        queue = self._queues[name] = asyncio.Queue()
        answer = asyncio.ensure_future(generate(request))
        try:
            while not (answer.done() and queue.empty()):
                fresh = asyncio.ensure_future(queue.get())
                await asyncio.wait([fresh, answer], return_when=asyncio.FIRST_COMPLETED)
                if fresh.done():
                    yield fresh.result()
                else:
                    fresh.cancel()
            await answer
        finally:
            self._queues.pop(name, None)
            if not answer.done():
                answer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await answer
