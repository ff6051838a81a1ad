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
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, cast

from powertrain.errors import ConfigError, DeadlineError, HandshakeError, PowertrainError, StateError
from powertrain.interfaces.launcher import ProcessSpec
from powertrain.launch.ports import free_port
from powertrain.options import resolve
from powertrain.runtime.clients import InferPool, TrainClient, all_or_none
from powertrain.runtime.handles import Handle, InlineHandle
from powertrain.runtime.host import CLOSE_SECONDS
from powertrain.runtime.placement import EnginePlan, asked_of, environments, plan_engines, visible_for

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain.interfaces.launcher import Launcher
    from powertrain.interfaces.transfer import Transfer
    from powertrain.layout import Layout, Pair
    from powertrain.registry import Registry
    from powertrain.runtime.channel import DriverChannel
    from powertrain.specs import TransferSpec
    from powertrain.weights import TransferReport, WeightVersion

_LOG: Final = logging.getLogger("powertrain.driver")
FAILED_GRACE: Final = 1.0
"""Seconds that workers get to end by themselves after a failure, when one of them may be stuck."""
TIMEOUTS: Final[Mapping[str, float]] = {"start": 600.0, "step": 1800.0, "generate": 1800.0, "update": 300.0}
"""Seconds: start of all engines; a training step, save or export; a request; each step of an update and all else."""


class Driver:
    """All engines of one layout. `async with` starts and closes it; one event loop uses it.

    specs: for each part's label the `EngineSpec` that its ranks share (see `powertrain.runtime.placement`); its
    `place.device` says what the cards are. inline: "auto" or "never". head_mismatch: "refuse" or "allow". launcher,
    launcher_options: what starts workers. transfer: for pairs that name none with `via`; None picks by reach and rank.
    transfer_options: transfer -> its options. env: variables of every process, which always win; inherited: None
    takes this process's environment as the base, `{}` none. timeouts: as `TIMEOUTS`. run_dir: gets `logs/`.

    Everything that can be refused is refused here, before anything starts. After `start`: `train` and `infer` hold
    the clients by part label, `handles` every engine by its name. `heads_agree` is False where a mismatch was allowed.
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
        inherited: Mapping[str, str] | None = None,
        timeouts: Mapping[str, float] | None = None,
    ) -> None:
        self.layout = layout
        self.handles: dict[str, Handle] = {}
        self.train: dict[str, TrainClient] = {}
        self.infer: dict[str, InferPool] = {}
        self.timeouts = {**TIMEOUTS, **(timeouts or {})}
        self._registry = registry
        self._run_dir = Path(run_dir)
        self._launcher_name, self._launcher_options = launcher, dict(launcher_options or {})
        self._transfer_name, self._transfer_options = transfer, dict(transfer_options or {})
        self._env, self._inherited = env, inherited
        self._plans, self.heads_agree = plan_engines(
            layout, specs, registry=registry, inline=inline, head_mismatch=head_mismatch
        )
        self._visible = visible_for(layout, self._plans)
        self._picked = {(pair.train.label, pair.infer.label): self._pick(pair) for pair in layout.pairs}
        self._transfers: dict[tuple[str, str], Transfer] = {}
        self._pushing: dict[str, asyncio.Lock] = {}
        self._ending = threading.Lock()
        self._channel: DriverChannel | None = None
        self._launcher: Launcher | None = None
        self._state = "new"

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
        """Return the pair's transfer, made on first use: the one named by `via`, else the one the run names, else the
        lowest rank among installed transfers that reach from one part to the other.
        """
        key = (train, infer)
        if key not in self._picked:
            pairs = ", ".join(f"{a} -> {b}" for a, b in self._picked) or "none"
            message = f"no weights go from {train!r} to {infer!r}; the layout's pairs are: {pairs}"
            raise ConfigError(message)
        if key not in self._transfers:
            spec = self._picked[key]
            options = resolve(spec.options, self._transfer_options.get(spec.name, {}), where=f"transfer {spec.name}")
            made: Transfer = self._registry.load_class(spec)(spec.name, options)
            made.source, made.sinks = self.train[train].handle, self.infer[infer].handles
            self._transfers[key] = made
        return self._transfers[key]

    async def push(
        self, train: str, infer: str, version: WeightVersion, *, pause_mode: str = "wait", **update: Any
    ) -> TransferReport:
        """Move the training part's weights into the inference part under a new version; `update`: more of `Update`.

        Pushes to one part wait for each other. Errors as `powertrain.weights.transaction.run_update`.
        """
        from powertrain.weights import Update

        transfer = self.transfer(train, infer)
        async with self._pushing.setdefault(infer, asyncio.Lock()):
            return await transfer.push(
                Update(version=version, **update), deadline=self.timeouts["update"], pause_mode=pause_mode
            )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _start(self, end: float) -> None:
        plans = [plan if plan.inline else plan.at(free_port()) for plan in self._plans]
        envs = {
            plan.name: environments(
                plan,
                visible=self._visible,
                ranks_on_host=self.layout.cards,
                user=self._env,
                inherited=self._inherited,
            )
            for plan in plans
        }
        apart = [plan for plan in plans if not plan.inline]
        if apart:
            await self._start_workers(apart, envs, end)
        for plan in plans:
            self.handles[plan.name] = self._handle(plan)
        self._make_clients()

        async def open_inline() -> None:
            for plan in plans:
                if plan.inline:
                    await self._open(plan, envs, end)

        await all_or_none([open_inline(), *(self._open(plan, envs, end) for plan in apart)])

    async def _open(self, plan: EnginePlan, envs: Mapping[str, list[dict[str, str]]], end: float) -> None:
        asked = [asked_of(plan, env, self._env) for env in envs[plan.name]]
        await self.handles[plan.name].open(plan.specs, asked, deadline=max(0.0, end - time.monotonic()))

    def _handle(self, plan: EnginePlan) -> Handle:
        if plan.inline:
            return InlineHandle(plan.name, plan.part.role, self._registry)
        from powertrain.runtime.handles import WorkerHandle

        assert self._channel is not None
        return WorkerHandle(plan.name, plan.part.role, self._channel, plan.workers)

    def _make_clients(self) -> None:
        for part in self.layout.parts:
            handles = [self.handles[plan.name] for plan in self._plans if plan.part.label == part.label]
            if part.role == "train":
                self.train[part.label] = TrainClient(
                    handles[0], step_deadline=self.timeouts["step"], deadline=self.timeouts["update"]
                )
            else:
                self.infer[part.label] = InferPool(
                    handles, deadline=self.timeouts["generate"], control_deadline=self.timeouts["update"]
                )

    async def _start_workers(
        self, plans: list[EnginePlan], envs: Mapping[str, list[dict[str, str]]], end: float
    ) -> None:
        """Start all workers and wait until they have registered; one that dies is told with the end of its log."""
        from powertrain.runtime.channel import DriverChannel

        spec = self._registry.launcher(self._launcher_name)
        options = resolve(spec.options, self._launcher_options, where=f"launcher {spec.name}")
        launcher: Launcher = self._registry.load_class(spec)(options, logs=str(self._run_dir / "logs"))
        self._launcher = launcher
        channel = self._channel = DriverChannel(launcher.status)
        atexit.register(self._end_workers)
        greetings: dict[str, Any] = {}
        processes = []
        for plan in plans:
            for rank, name in enumerate(plan.workers):
                greetings[name] = asyncio.wrap_future(channel.expect(name, engine=plan.name, rank=rank))
                config = {**channel.invitation, "name": name, "rank": rank, "role": plan.part.role}
                config["backend"] = plan.part.backend
                processes.append(
                    ProcessSpec(
                        name=name,
                        argv=(plan.python, "-m", "powertrain.runtime.worker"),
                        env={**envs[plan.name][rank], "POWERTRAIN_WORKER": json.dumps(config)},
                        cwd=str(Path.cwd()),
                    )
                )
        await asyncio.to_thread(launcher.start, processes)
        _, silent = await asyncio.wait(
            greetings.values(), timeout=max(0.0, end - time.monotonic()), return_when=asyncio.FIRST_EXCEPTION
        )
        for waiter in greetings.values():
            if waiter.done() and waiter.exception():
                await waiter
        if silent:
            late = [name for name, waiter in greetings.items() if waiter in silent]
            message = (
                f"{', '.join(late)} did not register within {self.timeouts['start']:g} s; see {self._run_dir / 'logs'}"
            )
            raise DeadlineError(message, who=", ".join(late), what="start", seconds=self.timeouts["start"])
        for plan in plans:
            _check_alike(plan, [await greetings[name] for name in plan.workers])

    def _pick(self, pair: Pair) -> TransferSpec:
        """Choose a pair's transfer. All workers of this release are on the driver's host."""
        plans = [plan for plan in self._plans if plan.part.label in {pair.train.label, pair.infer.label}]
        reach = {"host", "network"}
        reach |= {"process"} if all(plan.inline for plan in plans) else set()
        reach |= {"device"} if pair.colocated and plans[0].specs[0].place.device == "cuda" else set()
        name = pair.via or self._transfer_name
        between = f"from {pair.train.label!r} to {pair.infer.label!r}"
        if name is not None:
            spec = self._registry.transfer(name)
            if not reach & set(spec.reach):
                message = (
                    f"transfer {name!r} reaches within {'/'.join(spec.reach)}, but {between} it takes one of "
                    f"{', '.join(sorted(reach))}; name another, or none"
                )
                raise ConfigError(message)
            return spec
        found = cast("Mapping[str, TransferSpec]", self._registry.specs("transfer"))
        fitting = [spec for spec in found.values() if reach & set(spec.reach)]
        if not fitting:
            message = f"no installed transfer reaches {between}; there are: {', '.join(found) or 'none'}"
            raise ConfigError(message)
        return min(fitting, key=lambda spec: (spec.rank, spec.name))

    async def _close(self) -> None:
        async with contextlib.AsyncExitStack() as stack:  # last in, first out; each runs whatever the others do
            stack.push_async_callback(asyncio.to_thread, self._end_workers)
            for handle in self.handles.values():
                if handle.inline:
                    stack.callback(handle.stop)
                    limit = FAILED_GRACE if handle.failed else CLOSE_SECONDS
                    stack.push_async_callback(_tolerant, handle.call("close", deadline=limit), f"engine {handle.name}")
            for (train, infer), transfer in self._transfers.items():
                stack.push_async_callback(_tolerant, transfer.close(), f"the transfer from {train} to {infer}")

    def _end_workers(self) -> None:
        """Ask all workers to close their engines and exit, end those that do not, and sweep up. May be called twice."""
        with self._ending:
            launcher, self._launcher = self._launcher, None
            if launcher is None or self._channel is None:
                return
            atexit.unregister(self._end_workers)
            self._channel.dismiss()
            failed = any(handle.failed for handle in self.handles.values())
            end = time.monotonic() + (FAILED_GRACE if failed or not self.handles else CLOSE_SECONDS)
            while (alive := [st.name for st in launcher.status() if st.code is None]) and time.monotonic() < end:
                time.sleep(0.02)
            try:
                launcher.stop(alive, grace=FAILED_GRACE)
                launcher.close()
            finally:
                self._channel.close()


async def _tolerant(closing: Awaitable[Any], what: str) -> None:
    try:
        await closing
    except (PowertrainError, OSError) as exc:
        _LOG.warning("closing %s: %s", what, exc)


def _check_alike(plan: EnginePlan, greetings: list[Mapping[str, Any]]) -> None:
    """Raise HandshakeError unless all ranks of an engine have the same plugin and version."""
    found = {name: str(greeting["plugin"]) for name, greeting in zip(plan.workers, greetings, strict=True)}
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} has {plugin}" for name, plugin in found.items())
        message = f"the ranks of {plan.name} run different plugins: {told}"
        raise HandshakeError(message, worker=plan.name)
