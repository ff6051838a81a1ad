"""The driver's half that core's transfers share: manifests to plan, calls to endpoints, and nobody left behind."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from powertrain.errors import PowertrainError, TransferError
from powertrain.interfaces.transfer import Transfer
from powertrain.weights import Manifest, TransferPlan, TransferReport, plan_transfer
from powertrain.weights.transaction import together

if TYPE_CHECKING:
    from powertrain.interfaces.transfer import EngineHandle
    from powertrain.weights import Update


class PlannedTransfer(Transfer):
    """A transfer whose plan is made on the driver. PLUGIN: the entry point's name, by which hosts find the endpoints.

    session: names this pair in its endpoints, which serve every pair of their engine.
    """

    PLUGIN: ClassVar[str]

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self.session = secrets.token_hex(4)
        self._made: tuple[list[list[Manifest]], TransferPlan] | None = None
        self._held: list[EngineHandle] = []

    @property
    def bucket_bytes(self) -> int:
        """The most bytes of one bucket."""
        return 1 << 62

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

    async def push(self, update: Update, *, deadline: float, pause_mode: str = "wait") -> TransferReport:
        """Run one update; see `Transfer.push`."""
        held, self._held = self._held, []
        if self._made is not None and self._made[1].kind == update.kind:
            self._held = held
        try:
            report = await super().push(update, deadline=deadline, pause_mode=pause_mode)
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

    async def _call(self, handle: EngineHandle, op: str, *, deadline: float, **payload: Any) -> list[Any]:
        """Run an endpoint's operation on every rank of an engine."""
        return await handle.call(
            "endpoint.call", self.PLUGIN, op, {"session": self.session, **payload}, deadline=deadline
        )

    def _check_kind(self, plan: TransferPlan, update: Update) -> None:
        if plan.kind != update.kind:
            message = f"the trainer sends weights of kind {plan.kind!r} and the update is of kind {update.kind!r}"
            raise TransferError(message, phase="gather")
