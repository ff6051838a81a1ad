"""The driver: starts every engine of a layout where it belongs, hands out clients and transfers, and ends it all."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Awaitable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from powertrain.errors import ConfigError, DeadlineError, PowertrainError, StateError, TransferError
from powertrain.interfaces.launcher import ProcessSpec
from powertrain.options import resolve
from powertrain.runtime.clients import TIMEOUTS, InferPool, TrainClient, all_or_none
from powertrain.runtime.handles import Handle, InlineHandle, WorkerHandle
from powertrain.runtime.host import CLOSE_SECONDS
from powertrain.runtime.placement import EnginePlan, check_ready, pick_transfer, plan_engines, visible_for
from powertrain.weights import TransferReport, Update, WeightVersion

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain.interfaces.launcher import Launcher
    from powertrain.interfaces.transfer import Transfer
    from powertrain.layout import Layout
    from powertrain.registry import Registry
    from powertrain.runtime.channel import DriverChannel

_LOG: Final = logging.getLogger("powertrain.driver")
FAILED_GRACE: Final = 1.0
"""Seconds that workers get to end by themselves after a failure, when one of them may be stuck."""


class Driver:
    """All engines of one layout. `async with` starts and closes it; one event loop uses it.

    specs: for each part's label the `EngineSpec` that its ranks share (see `powertrain.runtime.placement`); its
    `place.device` says what the cards are. inline: "auto" or "never". head_mismatch: "refuse" or "allow". launcher,
    launcher_options: what starts workers. transfer: for pairs that name none with `via`; None picks by reach and rank.
    transfer_options: transfer -> its options. env: variables of every process, which always win. timeouts: as
    `powertrain.runtime.clients.TIMEOUTS`. run_dir: gets `logs/`.

    Everything that can be refused is refused here, before anything starts. `plans` says where every rank will go,
    `picked` each pair's transfer. After `start`: `train` and `infer` hold the clients by part label, `handles` every
    engine by its name. `heads_agree` is False where a mismatch was allowed.
    """

    def __init__(
        self,
        layout: Layout,
        specs: Mapping[str, EngineSpec],
        *,
        registry: Registry,
        run_dir: str | os.PathLike[str],
        inline: str = "auto",
        head_mismatch: str = "refuse",
        launcher: str = "local",
        launcher_options: Mapping[str, Any] | None = None,
        transfer: str | None = None,
        transfer_options: Mapping[str, Mapping[str, Any]] | None = None,
        env: Mapping[str, str] | None = None,
        timeouts: Mapping[str, float] | None = None,
    ) -> None:
        self.layout = layout
        self.plans, self.heads_agree = plan_engines(
            layout, specs, registry=registry, inline=inline, head_mismatch=head_mismatch
        )
        self.picked = {
            (pair.train.label, pair.infer.label): pick_transfer(pair, self.plans, transfer, registry)
            for pair in layout.pairs
        }
        self.timeouts = {**TIMEOUTS, **(timeouts or {})}
        self.handles: dict[str, Handle] = {}
        self.train: dict[str, TrainClient] = {}
        self.infer: dict[str, InferPool] = {}
        self._visible = visible_for(layout, self.plans)
        self._registry = registry
        self._logs = Path(run_dir) / "logs"
        spec = self._launcher_spec = check_ready(registry.launcher(launcher), registry)
        self._launcher_options = resolve(spec.options, launcher_options or {}, where=f"launcher {launcher}")
        given = transfer_options or {}
        self._transfer_options = {
            name: resolve(registry.transfer(name).options, given.get(name, {}), where=f"transfer {name}")
            for name in dict.fromkeys((*(spec.name for spec in self.picked.values()), *given))
        }
        self._env = env
        for plan in self.plans:
            self._environments(plan)
        self._transfers: dict[tuple[str, str], Transfer] = {}
        self._placed: dict[str, EnginePlan] = {}
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self._ending = threading.Lock()
        self._launcher: Launcher | None = None
        self._live: tuple[Launcher, DriverChannel]
        self._state = "new"
        self._ready = False

    async def start(self, version: WeightVersion | str | None = None) -> None:
        """Start all workers, then build every engine; returns when all are ready. On any failure all is closed again.

        Workers build at the same time; engines in this process one after another, since they share its random
        states. version: given to every inference engine with its first `resume`.
        """
        if self._state != "new":
            message = f"this driver was {self._state} already; make a new one"
            raise StateError(message)
        self._state = "started"
        try:
            await self._start(time.monotonic() + self.timeouts["start"])
            self._ready = True
            if version is not None:
                for pool in self.infer.values():
                    await pool.resume(str(version))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Close transfers and engines and end every process; leaves no process, segment or port. May be called twice.

        Runs at exit of the interpreter too, as far as processes go.
        """
        if self._state != "closed":
            self._state = "closed"
            await asyncio.shield(self._close())

    def transfer(self, train: str, infer: str) -> Transfer:
        """Return the pair's transfer, made on first use; `picked` says which."""
        key = (train, infer)
        if key not in self.picked:
            pairs = ", ".join(f"{a} -> {b}" for a, b in self.picked) or "none"
            message = f"no weights go from {train!r} to {infer!r}; the layout's pairs are: {pairs}"
            raise ConfigError(message)
        if key not in self._transfers:
            spec = self.picked[key]
            made: Transfer = self._registry.load_class(spec)(spec.name, self._transfer_options[spec.name])
            made.source, made.sinks = self.train[train].handle, self.infer[infer].handles
            self.train[train].transfers.append(made)
            self._transfers[key] = made
        return self._transfers[key]

    async def push(
        self,
        train: str,
        infer: str,
        version: WeightVersion,
        *,
        pause_mode: str = "wait",
        on_sink_failure: str = "fail",
        **update: Any,
    ) -> TransferReport:
        """Move the training part's weights into the inference part under a new version; `update`: more of `Update`.

        Pushes to one part wait for each other, and a training step waits for a push. Errors as
        `powertrain.weights.transaction.run_update`. on_sink_failure: "fail", or "evict": while other engines are left,
        one that fails is taken out of the set, the others are updated anew and published, and it is started again; the
        first update that it then takes part in brings it back. The report's details then count those that are out.
        """
        transfer, pool = self.transfer(train, infer), self.infer[infer]
        async with pool.updating, self.train[train].still:
            transfer.sinks = [handle for handle in pool.handles if self._back(handle.name, pool)]
            while True:
                try:
                    report = await transfer.push(
                        Update(version=version, **update), deadline=self.timeouts["update"], pause_mode=pause_mode
                    )
                    break
                except TransferError as exc:
                    lost = [handle for handle in transfer.sinks if handle.name in exc.failed]
                    if on_sink_failure != "evict" or not lost or len(lost) == len(transfer.sinks):
                        raise
                    _LOG.warning("%s; taken out and started again: %s", exc, ", ".join(one.name for one in lost))
                    for handle in lost:
                        pool.out.add(handle.name)
                        self._restarts[handle.name] = asyncio.create_task(self._restart(handle.name, pool))
                    transfer.sinks = [handle for handle in transfer.sinks if handle not in lost]
            pool.out -= {handle.name for handle in transfer.sinks}
        return report.noting(evicted=float(len(pool.out))) if on_sink_failure == "evict" else report

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _start(self, end: float) -> None:
        placed = [plan.placed() for plan in self.plans]
        self._placed = {plan.name: plan for plan in placed}
        envs = {plan.name: self._environments(plan) for plan in placed}
        here, apart = ([plan for plan in placed if plan.inline == inline] for inline in (True, False))
        if apart:
            await self._start_workers([(plan, [env for env, _ in envs[plan.name]]) for plan in apart], end)
        self._make_clients()

        async def open_engines(plans: list[EnginePlan]) -> None:
            for plan in plans:
                asked = [asked for _, asked in envs[plan.name]]
                await self.handles[plan.name].open(plan.specs, asked, deadline=max(0.0, end - time.monotonic()))

        await all_or_none([open_engines(plans) for plans in (here, *([plan] for plan in apart))])

    def _environments(self, plan: EnginePlan) -> list[tuple[dict[str, str], dict[str, str]]]:
        return plan.environments(visible=self._visible, ranks_on_host=self.layout.cards, user=self._env)

    def _make_clients(self) -> None:
        for plan in self.plans:
            if plan.inline:
                self.handles[plan.name] = InlineHandle(plan.name, plan.part.role, self._registry)
            else:
                self.handles[plan.name] = WorkerHandle(plan.name, plan.part.role, self._live[1], plan.workers)
        for part in self.layout.parts:
            handles = [self.handles[plan.name] for plan in self.plans if plan.part.label == part.label]
            if part.role == "train":
                self.train[part.label] = TrainClient(handles, self.timeouts)
            else:
                self.infer[part.label] = InferPool(handles, self.timeouts)

    def _back(self, name: str, pool: InferPool) -> bool:
        """Tell whether an engine takes part in an update; one whose start has failed is started once more."""
        task = self._restarts.get(name)
        if name not in pool.out or task is None:
            return True
        if task.done() and (why := task.exception()):
            _LOG.warning("engine %s could not be started again: %s", name, why)
            self._restarts[name] = asyncio.create_task(self._restart(name, pool))
        return task.done() and task is self._restarts[name]

    async def _restart(self, name: str, pool: InferPool) -> None:
        """End an engine's workers, whatever state they are in, and start and build it anew."""
        launcher, channel = self._live
        left = [one.name for one in launcher.status() if one.name in self._placed[name].workers]
        await asyncio.to_thread(launcher.stop, left, grace=FAILED_GRACE)
        plan = self._placed[name] = replace(self._placed[name], life=self._placed[name].life + 1).placed()
        envs = self._environments(plan)
        end = time.monotonic() + self.timeouts["start"]
        await self._launch([(plan, [env for env, _ in envs])], end)
        handle = self.handles[name] = WorkerHandle(name, plan.part.role, channel, plan.workers)
        await handle.open(plan.specs, [asked for _, asked in envs], deadline=max(0.0, end - time.monotonic()))
        pool.handles = tuple(handle if other.name == name else other for other in pool.handles)

    async def _start_workers(self, plans: list[tuple[EnginePlan, list[dict[str, str]]]], end: float) -> None:
        """Make the launcher and the channel, and start all workers."""
        from powertrain.runtime.channel import DriverChannel

        made = self._registry.load_class(self._launcher_spec)
        launcher = made(self._launcher_options, logs=str(self._logs))
        self._live = launcher, DriverChannel(launcher.status)
        self._launcher = launcher
        atexit.register(self._end_workers)
        await self._launch(plans, end)

    async def _launch(self, plans: list[tuple[EnginePlan, list[dict[str, str]]]], end: float) -> None:
        """Start workers and wait until they have registered; one that dies is told with the end of its log."""
        launcher, channel = self._live
        expected: dict[str, Future[Any]] = {}
        processes = []
        for plan, envs in plans:
            for rank, (name, env) in enumerate(zip(plan.workers, envs, strict=True)):
                expected[name] = channel.expect(name, engine=plan.name, rank=rank)
                env["POWERTRAIN_WORKER"] = json.dumps({**channel.invitation, "name": name})
                argv = (plan.python, "-m", "powertrain.runtime.worker")
                processes.append(ProcessSpec(name=name, argv=argv, env=env, cwd=str(Path.cwd())))
        await asyncio.to_thread(launcher.start, processes)
        greetings = {name: asyncio.wrap_future(future) for name, future in expected.items()}
        try:
            async with asyncio.timeout(end - time.monotonic()):
                await asyncio.gather(*greetings.values())
        except TimeoutError as exc:
            late = ", ".join(name for name, one in greetings.items() if one.cancelled())
            message = f"{late} did not register within {self.timeouts['start']:g} s; see {self._logs}"
            raise DeadlineError(message, who=late, what="start", seconds=self.timeouts["start"]) from exc

    async def _close(self) -> None:
        for task in self._restarts.values():
            task.cancel()
        await asyncio.gather(*self._restarts.values(), return_exceptions=True)
        async with contextlib.AsyncExitStack() as stack:  # last in, first out; each runs whatever the others do
            stack.push_async_callback(asyncio.to_thread, self._end_workers)
            for handle in self.handles.values():
                if isinstance(handle, InlineHandle):
                    stack.callback(handle.stop)
                    limit = FAILED_GRACE if handle.failed else CLOSE_SECONDS
                    stack.push_async_callback(_tolerant, handle.call("close", deadline=limit), f"engine {handle.name}")
            for (train, infer), transfer in self._transfers.items():
                stack.push_async_callback(_tolerant, transfer.close(), f"the transfer from {train} to {infer}")

    def _end_workers(self) -> None:
        """Ask all workers to close their engines and exit, end those that do not, and sweep up. May be called twice."""
        with self._ending:
            launcher, self._launcher = self._launcher, None
            if launcher is None:
                return
            atexit.unregister(self._end_workers)
            channel = self._live[1]
            channel.dismiss()
            lost = not self._ready or any(handle.failed or handle.quiet() for handle in self.handles.values())
            end = time.monotonic() + (FAILED_GRACE if lost else CLOSE_SECONDS)
            while (alive := [st.name for st in launcher.status() if st.code is None]) and time.monotonic() < end:
                time.sleep(0.02)
            try:
                launcher.stop(alive, grace=FAILED_GRACE)
                launcher.close()
            finally:
                channel.close()


async def _tolerant(closing: Awaitable[Any], what: str) -> None:
    try:
        await closing
    except (PowertrainError, OSError) as exc:
        _LOG.warning("closing %s: %s", what, exc)
