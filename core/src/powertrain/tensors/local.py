"""Transfer `local`: both engines live in one process; the sink copies from the trainer's tensors, or shares them.

Sharing moves no byte: the engine's parameters become the trainer's memory. It is right only while no request is in
flight when the trainer steps (synchronous rollouts); the sink's guard refuses to answer between a step and the push.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError, TransferError
from powertrain.interfaces.transfer import Loads
from powertrain.tensors.planned import PlannedTransfer
from powertrain.tensors.sink import BoxSink
from powertrain.tensors.verify import Checked
from powertrain.tensors.views import pieces

if TYPE_CHECKING:
    from powertrain.interfaces.build import RankSpec
    from powertrain.interfaces.weights import Piece, WeightSink, WeightSource
    from powertrain.weights import TransferPlan, Update
    from powertrain.weights.plan import Read

_offered: dict[str, WeightSource] = {}
"""Session -> source, within this process: how a sink endpoint finds its source."""
_lock = threading.Lock()


class LocalSource(Checked):
    """Offers its source to the sinks of this process."""

    def __init__(self, weights: WeightSource, place: RankSpec) -> None:
        self._weights = weights
        self._sessions: set[str] = set()

    def offer(self, session: str) -> None:
        """Make the source known, its weights complete in memory."""
        self._weights.fence()
        with _lock:
            _offered[session] = self._weights
        self._sessions.add(session)

    def release(self, session: str) -> None:
        """Take an offer back."""
        with _lock:
            _offered.pop(session, None)
        self._sessions.discard(session)


class LocalSink(Checked):
    """Takes weights from a source of this process."""

    def __init__(self, weights: WeightSink, place: RankSpec) -> None:
        self._weights = weights

    def take(self, session: str, reads: Sequence[Read], share: str) -> int:
        """Share ("yes": or fail, "auto": or copy) or copy ("no") every read; returns bytes copied."""
        with _lock:
            source = _offered.get(session)
        if source is None:
            message = "transfer 'local' needs both engines in one process, and the trainer is not in this one; use shm"
            raise TransferError(message, phase="load")
        if share != "no" and isinstance(self._weights, BoxSink) and self._weights.share(source, _pieces(source, reads)):
            return 0
        if share == "yes":
            message = "weights cannot be shared: dtype, device or layout differ between the engines; use share=no"
            raise TransferError(message, phase="load")
        self._weights.apply(_pieces(source, reads))
        return sum(read.bytes for read in reads)


def _pieces(source: WeightSource, reads: Sequence[Read]) -> Iterator[Piece]:
    tensors = source.tensors()
    return pieces(reads, lambda block: tensors[block.storage])


class LocalTransfer(PlannedTransfer):
    """Driver's half. Options: `share` (auto, yes, no) and `synchronous`, by which the recipe vouches for itself."""

    PLUGIN = "local"

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        super().__init__(name, options)
        share, synchronous = options.get("share", "auto"), bool(options.get("synchronous", False))
        if share == "yes" and not synchronous:
            message = "share=yes needs synchronous rollouts: a request in flight would see the trainer's half-made step"
            raise ConfigError(message)
        self._share = share if synchronous else "no"

    async def gather(self, plan: TransferPlan, update: Update, *, deadline: float) -> Loads | None:
        """Offer the source; every sink shares or copies it whole, in one command."""
        self._check_kind(plan, update)
        if {block.rank for block in plan.blocks} - {0} or any(len(engine) != 1 for engine in plan.reads):
            message = "transfer 'local' moves weights between engines of one rank; use shm for more"
            raise TransferError(message, phase="gather")
        await self._call(self.source, "offer", deadline=deadline)
        share = self._share if plan.kind == "full" else "no"
        payloads = [{"session": self.session, "reads": reads[0], "share": share} for reads in plan.reads]
        return self._at_once(update, Loads([("endpoint.call", (self.PLUGIN, "take", payload)) for payload in payloads]))
