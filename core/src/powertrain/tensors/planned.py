"""The driver's half that core's transfers share: manifests to plan, calls to endpoints, and nobody left behind."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from powertrain.errors import PowertrainError, TransferError
from powertrain.interfaces.transfer import Loads, Transfer
from powertrain.weights import Manifest, TransferPlan, TransferReport, plan_transfer
from powertrain.weights.transaction import together

if TYPE_CHECKING:
    from powertrain.interfaces.transfer import EngineHandle
    from powertrain.weights import Update


def margin(deadline: float) -> float:
    """Return the seconds that a rank may wait, so that its error arrives within the deadline."""
    return deadline - min(2.0, 0.3 * deadline)


class PlannedTransfer(Transfer):
    """A transfer whose plan is made on the driver. PLUGIN: the entry point's name, by which hosts find the endpoints.

    session: names this pair in its endpoints, which serve every pair of their engine.
    """

    PLUGIN: ClassVar[str]
    BUCKET_MB: ClassVar[int | None] = None
    """Default of the option `bucket_mb`; None for transfers that do not have it, whose buckets have no bound."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self.session = secrets.token_hex(4)
        self._made: tuple[list[list[Manifest]], TransferPlan] | None = None
        self._held: list[EngineHandle] = []
        self._ready: tuple[TransferPlan, list[str]] | None = None
        self._pushes = -1
        self._loads: Loads | None = None

    @property
    def bucket_bytes(self) -> int:
        """The most bytes of one bucket."""
        return 1 << 62 if self.BUCKET_MB is None else int(self.options.get("bucket_mb") or self.BUCKET_MB) << 20

    async def plan(self, source: EngineHandle, sinks: Sequence[EngineHandle], *, deadline: float) -> TransferPlan:
        """Ask every rank for its manifest and plan; an equal set of manifests gives the very plan of last time.

        A manifest holds for as long as its engine lives, so it is not asked for after an update of the same engines
        that went well; after one that failed it is, since an engine may have been started again.
        """
        if self._made is not None and self._held == [source, *sinks]:
            return self._made[1]
        manifests = await together([h.call("weights.manifest", deadline=deadline) for h in [source, *sinks]])
        if self._made is None or self._made[0] != manifests:
            self.manifests = [manifest for engine in manifests for manifest in engine]
            self._made = manifests, plan_transfer(manifests[0], manifests[1:], bucket_bytes=self.bucket_bytes)
        return self._made[1]

    async def _push(self, update: Update, *, deadline: float, pause_mode: str) -> TransferReport:
        """Run one update; see `Transfer.push`."""
        self._pushes += 1
        held, self._held = self._held, []
        if self._made is not None and self._made[1].kind == update.kind:
            self._held = held
        try:
            report = await super()._push(update, deadline=deadline, pause_mode=pause_mode)
        except BaseException:
            self._held = []
            raise
        self._held = [self.source, *self.sinks]
        return report

    async def close(self) -> None:
        """Free what the pair holds on all ranks; a rank that cannot answer any more is passed over."""
        for handle in [*([self.source] if hasattr(self, "source") else []), *getattr(self, "sinks", [])]:
            try:
                await self._call(handle, "release", deadline=10.0)
            except (PowertrainError, OSError):  # it is gone, and what it held went with it
                continue

    def _take_ready(self, plan: TransferPlan) -> bool:
        """Tell whether all ranks are ready for this plan; no longer, until `_set_ready` says that all has gone well.

        So after a failure the next update tells all ranks anew.
        """
        ready, self._ready = self._ready, None
        return ready is not None and ready[0] is plan and ready[1] == [sink.name for sink in self.sinks]

    def _set_ready(self, plan: TransferPlan) -> None:
        self._ready = plan, [sink.name for sink in self.sinks]

    def _rank_names(self, worlds: Sequence[int]) -> list[str]:
        """Return what errors call all ranks, the trainer's first; worlds: of the trainer and of each engine."""
        handles = zip([self.source, *self.sinks], worlds, strict=True)
        return [f"{handle.name} rank {rank}" for handle, world in handles for rank in range(world)]

    async def _call(self, handle: EngineHandle, op: str, *, deadline: float, **payload: Any) -> list[Any]:
        """Run an endpoint's operation on every rank of an engine."""
        return await handle.call(
            "endpoint.call", self.PLUGIN, op, {"session": self.session, **payload}, deadline=deadline
        )

    def _due(self, update: Update) -> bool:
        """Tell whether this update is to be verified: the first of every `verify`, of full weights."""
        every = int(self.options.get("verify") or 0)
        return every > 0 and self._pushes % every == 0 and update.kind == "full"

    def _at_once(self, update: Update, loads: Loads) -> Loads | None:
        """Return what `gather` returns for these loads: an update that is verified takes more than one command."""
        self._loads = loads if self._due(update) else None
        return None if self._loads else loads

    async def move(self, plan: TransferPlan, update: Update, meter: Any, *, deadline: float) -> None:
        """Run the loads that `_at_once` kept, and verify them."""
        assert self._loads is not None
        await self._load_apart(self._loads, meter, deadline)
        await self._verify(plan, update, meter, deadline=deadline)

    async def _load_apart(self, loads: Loads, meter: Any, deadline: float) -> None:
        """Run loads by a message of their own, into sinks that have begun the update."""
        with meter.phase("load"):
            calls = [
                sink.call(method, *args, deadline=deadline)
                for sink, (method, args) in zip(self.sinks, loads.commands, strict=True)
            ]
            answers = await together([*loads.beside, *calls])  # of two faults the trainer's is the cause
            meter.bytes += sum(sum(answer) for answer in answers[len(loads.beside) :])

    async def _verify(self, plan: TransferPlan, update: Update, meter: Any, *, deadline: float) -> None:
        """Where it is due, compare what every sink rank holds by now with the trainer; the last act of `move`."""
        if not self._due(update):
            return
        from powertrain.tensors.verify import Comparison

        assert self._made is not None
        with meter.phase("load"):
            comparison = Comparison.of(plan, self._made[0])
            calls = [self._call(self.source, "checksums", wanted=comparison.source, deadline=deadline)]
            calls += [
                self._call(sink, "checksums", wanted=wanted, deadline=deadline)
                for sink, wanted in zip(self.sinks, comparison.sinks, strict=True)
            ]
            source, *sinks = await together(calls)
            faults = [f"{self.sinks[e].name}: {what}" for e, what in comparison.faults(source, sinks)]
            if faults:
                more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
                message = f"weights differ from the trainer's after they were loaded: {'; '.join(faults[:3])}{more}"
                raise TransferError(message, phase="load")

    def _check_kind(self, plan: TransferPlan, update: Update) -> None:
        if plan.kind != update.kind:
            message = f"the trainer sends weights of kind {plan.kind!r} and the update is of kind {update.kind!r}"
            raise TransferError(message, phase="gather")
