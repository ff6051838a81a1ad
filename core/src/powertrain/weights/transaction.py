"""The transaction of an update: pause, begin, move, finish everywhere, and only then publish the version.

Whatever goes wrong (an exception, a cancelled task, a dead rank, a deadline), every sink ends steady with the old
version or unfit, the engines that are fit are resumed, and the next update can start at once.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import PowertrainError, TransferError
from powertrain.weights.update import Meter, TransferReport, Update

if TYPE_CHECKING:
    from powertrain.interfaces.transfer import Command, EngineHandle, Loads, Transfer

_PHASES: Final = {
    "pause": "pause",
    "weights.abort": "make_room",
    "weights.begin": "make_room",
    "endpoint.call": "load",
    "weights.finish": "finish",
    "resume": "resume",
}
"""Command of a sink's series -> the phase that it is."""
_LOAD: Final = ("endpoint.call", ())
"""Stands in a series for the transfer's own command."""


async def together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all calls at once, wait for all of them, then raise the first fault: none is left running behind.

    The other faults stand `beside` it.
    """
    answers = await asyncio.gather(*calls, return_exceptions=True)
    faults = [answer for answer in answers if isinstance(answer, BaseException)]
    if faults:
        if isinstance(faults[0], PowertrainError):
            faults[0].beside += tuple(faults[1:])
        raise faults[0]
    return answers


async def _each(handles: Sequence[EngineHandle], method: str, *args: Any, deadline: float) -> None:
    await together(handle.call(method, *args, deadline=deadline) for handle in handles)


@dataclass
class _Reached:
    """How far an update has come. paused: engines may be. finished: all sinks have, so that it can be published."""

    paused: bool = False
    finished: bool = False


async def run_update(transfer: Transfer, update: Update, *, deadline: float, pause_mode: str) -> TransferReport:
    """Run one update through `transfer` and return its report.

    Called by the driver, one update at a time for a set of sinks. deadline: seconds for each step, at the end of
    which the step fails with an error that names the rank. Raises `TransferError` naming the phase and the unfit
    sinks; the old version stays published. Once every sink has finished, publishing is carried to its end whatever
    happens. A cancel is raised when all that is to be done after it has been done, however often it comes.
    """
    meter, reached, sinks = Meter(), _Reached(), transfer.sinks
    try:
        await _steps(transfer, update, meter, reached, deadline, pause_mode)
    except BaseException as exc:
        unfit, cancelled = await _to_its_end(_roll_back(sinks, update, reached, deadline))
        if cancelled is not None:
            raise cancelled from exc
        if not isinstance(exc, PowertrainError | OSError | RuntimeError | ValueError):
            raise
        if unfit or not reached.finished:
            raise _failure(exc, transfer, update, meter, unfit) from exc
    return TransferReport(
        transfer=transfer.name,
        version=update.version,
        seconds=meter.seconds,
        bytes=meter.bytes,
        sinks=len(sinks),
        total_seconds=meter.total(),
    )


async def _steps(
    transfer: Transfer, update: Update, meter: Meter, reached: _Reached, deadline: float, pause_mode: str
) -> None:
    """Go through all phases. What an earlier update has left open, its abort having come too late, is aborted first."""
    sinks = transfer.sinks
    opening: list[Command] = [("weights.abort", []), ("weights.begin", [update])]
    with meter.phase("make_room"):
        plan = await transfer.plan(transfer.source, sinks, deadline=deadline)
    with meter.phase("gather"):
        loads = await transfer.gather(plan, update, deadline=deadline)
    reached.paused, published = True, False
    if loads is None:
        with meter.phase("pause"):
            await _each(sinks, "pause", pause_mode, deadline=deadline)
        with meter.phase("make_room"):
            await _each(sinks, "series", *opening, deadline=deadline)
        await transfer.move(plan, update, meter, deadline=deadline)
        with meter.phase("finish"):
            await _each(sinks, "weights.finish", deadline=deadline)
    else:
        published = len(sinks) == 1 == len(plan.reads[0])  # once the only rank has finished, all have
        series: list[Command] = [("pause", [pause_mode]), *opening, _LOAD, ("weights.finish", [])]
        series += [("resume", [str(update.version)])] if published else []
        await _load_at_once(sinks, series, loads, meter, deadline)
    reached.finished = True
    if not published:
        with meter.phase("resume"):
            await _each(sinks, "resume", str(update.version), deadline=deadline)


async def _to_its_end(work: Coroutine[Any, Any, list[str]]) -> tuple[list[str], asyncio.CancelledError | None]:
    """Await work that no cancel of this task cuts; return its answer, and the last cancel that came meanwhile."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancelled = exc
    return task.result(), cancelled


def _failure(
    exc: BaseException, transfer: Transfer, update: Update, meter: Meter, unfit: Sequence[str]
) -> TransferError:
    """Return the error that tells how an update has failed and what the engines carry now."""
    phase = _PHASES.get(getattr(exc, "during", ""), meter.failed or meter.current)
    ahead = [sink.name for sink in transfer.sinks if sink.version == str(update.version)]
    message = (
        f"update to weight version {update.version} over {transfer.name!r} failed in phase {phase!r}: {exc}"
        + (f"; answering with it already: {', '.join(ahead)}" if ahead else "")
        + (f"; unfit until the next update: {', '.join(unfit)}" if unfit else "")
        + ("" if ahead or unfit else "; every engine kept its old version")
    )
    failed = _at_fault(exc, transfer.source, transfer.sinks)
    return TransferError(message, phase=phase, unfit=tuple(unfit), failed=failed)


def _at_fault(exc: BaseException, source: EngineHandle, sinks: Sequence[EngineHandle]) -> tuple[str, ...]:
    """Name the sinks whose fault a failure is: those that failed and blame nobody, else those that are blamed.

    None where the trainer is one of these. An error blames the engines whose ranks its text names, beside its own.
    """
    own, blamed = set(), set()
    faults = [exc]
    for fault in faults:
        faults += getattr(fault, "beside", ())
        engine, text = getattr(fault, "engine", ""), getattr(fault, "who", "") or str(fault)
        named = {one.name for one in (source, *sinks) if re.search(rf"(?<![\w/.-]){re.escape(one.name)} rank \d", text)}
        named |= {source.name} if "trainer rank " in text else set()
        blamed |= named - {engine}
        if engine and not named - {engine}:
            own.add(engine)
    found = own or blamed
    return () if source.name in found else tuple(sink.name for sink in sinks if sink.name in found)


async def _load_at_once(
    sinks: Sequence[EngineHandle], series: Sequence[Command], loads: Loads, meter: Meter, deadline: float
) -> None:
    """Send each sink the series as one message, of which pausing has a deadline of its own; `wire` is its way."""
    begun, meter.current = time.perf_counter(), "load"
    calls = [
        sink.call("series", *(load if command is _LOAD else command for command in series), deadline=2 * deadline)
        for sink, load in zip(sinks, loads.commands, strict=True)
    ]
    answers = await together([*loads.beside, *calls])  # of two faults the trainer's is the cause
    ranks = [rank for engine in answers[len(loads.beside) :] for rank in engine]
    spent = [max(rank[at][0] for rank in ranks) for at in range(len(series))]
    for (method, _), seconds in zip(series, spent, strict=True):
        meter.seconds[_PHASES[method]] += seconds
    meter.seconds["wire"] += time.perf_counter() - begun - sum(spent)
    meter.bytes += sum(rank[series.index(_LOAD)][1] for rank in ranks)


async def _roll_back(sinks: Sequence[EngineHandle], update: Update, reached: _Reached, deadline: float) -> list[str]:
    """Bring every sink that may be paused to a clean state, all at once, and return the names of those left unfit.

    Where all have finished, each is published; else each is aborted, and resumed if it is fit: with its old version,
    unless it is the only one and has published by itself. One that cannot answer counts as unfit.
    """
    version = str(update.version)

    async def settled(sink: EngineHandle) -> bool:
        try:
            if reached.finished:
                await sink.call("resume", version, deadline=deadline)
                return True
            asked: list[Command] = [(f"weights.{name}", []) for name in ("abort", "state", "version")]
            ranks = await sink.call("series", *asked, deadline=deadline)
            if any(rank[1][1] != "steady" for rank in ranks):
                return False
            if all(rank[2][1] == version for rank in ranks):
                sink.version = version
            await sink.call("resume", None, deadline=deadline)
        except (PowertrainError, OSError):  # the first fault is the one to tell
            return False
        return True

    fit = await asyncio.gather(*(settled(sink) for sink in sinks if reached.paused))
    unfit = [sink for sink, well in zip(sinks, fit, strict=False) if not well]
    for sink in unfit:
        sink.unfit = True
    return [sink.name for sink in unfit]
