"""The transaction of an update: pause, begin, move, finish everywhere, and only then publish the version.

Whatever goes wrong (an exception, a cancelled task, a dead rank, a deadline), every sink ends steady with the old
version or unfit, the engines that are fit are resumed, and the next update can start at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.errors import PowertrainError, TransferError
from powertrain.weights.update import Meter, TransferReport, Update

if TYPE_CHECKING:
    from powertrain.interfaces.transfer import EngineHandle, Transfer


async def together(calls: Iterable[Awaitable[list[Any]]]) -> list[list[Any]]:
    """Await all calls at once, wait for all of them, then raise the first fault: none is left running behind."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers  # type: ignore[return-value]


async def _each(handles: Sequence[EngineHandle], method: str, *args: Any, deadline: float) -> None:
    await together(handle.call(method, *args, deadline=deadline) for handle in handles)


async def run_update(transfer: Transfer, update: Update, *, deadline: float, pause_mode: str) -> TransferReport:
    """Run one update through `transfer` and return its report.

    Called by the driver, one update at a time for a set of sinks. deadline: seconds for each step, at the end of
    which the step fails with an error that names the rank. Raises `TransferError` naming the phase and the unfit
    sinks; the old version stays published.
    """
    meter = Meter()
    sinks = transfer.sinks
    begun = False
    try:
        with meter.phase("pause"):
            await _each(sinks, "pause", pause_mode, deadline=deadline)
        with meter.phase("make_room"):
            plan = await transfer.plan(transfer.source, sinks, deadline=deadline)
            begun = True
            await _each(sinks, "weights.begin", update, deadline=deadline)
        await transfer.move(plan, update, meter, deadline=deadline)
        with meter.phase("finish"):
            await _each(sinks, "weights.finish", deadline=deadline)
        with meter.phase("resume"):
            await _each(sinks, "resume", str(update.version), deadline=deadline)
    except BaseException as exc:
        unfit = await asyncio.shield(_roll_back(sinks, begun=begun, deadline=deadline))
        if not isinstance(exc, PowertrainError | OSError | RuntimeError | ValueError):
            raise
        ahead = [sink.name for sink in sinks if sink.version == str(update.version)]
        message = (
            f"update to weight version {update.version} over {transfer.name!r} failed in phase {meter.current!r}: {exc}"
            + (f"; answering with it already: {', '.join(ahead)}" if ahead else "")
            + (f"; unfit until the next update: {', '.join(unfit)}" if unfit else "")
            + ("" if ahead or unfit else "; every engine kept its old version")
        )
        raise TransferError(message, phase=meter.current, unfit=tuple(unfit)) from exc
    return TransferReport(
        transfer=transfer.name,
        version=update.version,
        seconds=meter.seconds,
        bytes=meter.bytes,
        sinks=len(sinks),
        total_seconds=meter.total(),
    )


async def _roll_back(sinks: Sequence[EngineHandle], *, begun: bool, deadline: float) -> list[str]:
    """Abort every sink, resume those that are fit on their old version, and return the names of the others."""
    unfit = []
    for sink in sinks:
        try:
            states = ["steady"]
            if begun:
                await sink.call("weights.abort", deadline=deadline)
                states = await sink.call("weights.state", deadline=deadline)
            if all(state == "steady" for state in states):
                await sink.call("resume", None, deadline=deadline)
            else:
                unfit.append(sink.name)
        except (PowertrainError, OSError):  # a sink that cannot answer is unfit; the first fault is the one to tell
            unfit.append(sink.name)
    return unfit
