"""Transfer `p2p`: every trainer's rank sends each inference rank what that one needs, and nothing else, by the plan.

No rank gathers and none broadcasts. What one rank sends another of a bucket is one message, packed without gaps; both
sides go through their messages in one order that all ranks agree on, with a bounded number of bytes under way, so that
nobody waits for somebody who waits for him. Weights travel over a group that carries nothing else (NCCL, HCCL or gloo);
that all are there before the first byte, and that all have everything, is settled on a Gloo sidecar.

With the option `delta` both sides keep each message's bytes, and a message is what has changed of them where that is
less; its length goes ahead over the sidecar. Ranks that are sent the same bytes share one base and one comparison.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from powertrain.errors import TransferError
from powertrain.interfaces.weights import Piece
from powertrain.tensors import delta
from powertrain.tensors.bases import Bases, DeltaTransfer, where
from powertrain.tensors.messages import Message, messages
from powertrain.tensors.planned import margin
from powertrain.tensors.sidecar import Groups, Store
from powertrain.tensors.verify import Checked
from powertrain.tensors.views import device_of, read_view
from powertrain.weights.transaction import together

if TYPE_CHECKING:
    from powertrain.interfaces.build import RankSpec
    from powertrain.weights import TransferPlan, Update
    from powertrain.weights.plan import Read

_BACKENDS: Final = {"cuda": "nccl", "npu": "hccl"}
"""Kind of device -> what carries weights between devices of that kind."""
_BUCKETS: Final = 2
"""Buckets that a rank may have under way."""


@dataclass(slots=True)
class _Session:
    """One pair as a rank sees it. window: most bytes under way. store: where messages lie. keep: where bases lie."""

    groups: Groups
    messages: list[Message]
    window: int
    store: torch.device
    keep: torch.device
    bases: Bases = field(default_factory=Bases)


@dataclass(slots=True)
class _Sent:
    """A message under way. told: the work that carries its length, where that goes ahead."""

    message: Message
    buffer: torch.Tensor
    work: Any
    told: Any = None


class _End(Checked):
    """What both sides share: the groups, and the loop over messages."""

    def __init__(self, weights: Any, place: RankSpec) -> None:
        self._weights, self._rank = weights, place.rank
        self._sessions: dict[str, _Session] = {}

    def where(self, session: str) -> tuple[str, str]:
        """Return the kind of this rank's device and which one it is, whatever its number here."""
        device = device_of(self._weights)
        card = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        return device.type, card

    def _open(
        self, session: str, mine: int, reads: Sequence[tuple[int, Read]], how: Mapping[str, Any], seconds: float
    ) -> None:
        self.release(session)
        names = how["names"]
        groups = Groups((how["host"], how["port"]), how["prefix"], mine, names, how["backend"])
        groups.limit(seconds)
        try:
            groups.open()
        except BaseException as exc:
            groups.give_up(exc)
            groups.close()
            raise
        device = device_of(self._weights)
        store = torch.device("cpu") if groups.backend == "gloo" else device
        found = messages(reads, mine, len(names))
        self._sessions[session] = _Session(groups, found, how["window"], store, where(self._weights, how["delta"]))

    def base(self, session: str) -> str:
        """Return the version that this rank holds the base of, "" for none."""
        found = self._sessions.get(session)
        return found.bases.version if found else ""

    def _exchange(
        self,
        session: str,
        seconds: float,
        versions: tuple[str, str],
        ready: Callable[[], object],
        begin: Callable[[_Session, Message], _Sent],
        end: Callable[[_Session, _Sent], None],
    ) -> dict[str, int]:
        """Run all messages; begin(session, message) sends or receives, end(session, sent) uses what came.

        ready(): what is done first; of its fault the other ranks are told as of any other. versions: of the base that
        all ranks hold ("" for none), and that arrives. Returns `bytes` that were handed to the group for weights, `all`
        that they stand for, `saved` of these that went as changes, and the bases' tally.
        """
        found = self._sessions.pop(session, None)  # back in its place only if all goes well
        if found is None:
            text = f"rank {self._rank} has no groups for pair {session}; it was restarted, or failed"
            raise TransferError(text, phase="wire")
        groups = found.groups
        groups.limit(seconds)
        under_way: deque[_Sent] = deque()
        carried = waiting = whole = saved = 0
        try:
            with found.bases.update(*versions):
                ready()
                groups.barrier("liveness")
                for message in found.messages:
                    while under_way and waiting + message.bytes > found.window:
                        waiting -= self._end_first(found, under_way, end)
                    sent = begin(found, message)
                    under_way.append(sent)
                    waiting += message.bytes
                    carried += sent.buffer.numel()
                    whole += message.bytes
                    saved += message.bytes if sent.buffer.numel() < message.bytes else 0
                while under_way:
                    self._end_first(found, under_way, end)
                device = device_of(self._weights)
                if device.type != "cpu":
                    torch.accelerator.synchronize(device)
                groups.barrier("completion")
        except BaseException as exc:
            under_way.clear()  # works hold on to connections, which are to close now
            groups.give_up(exc)
            groups.close()
            raise
        self._sessions[session] = found
        return {"bytes": carried, "all": whole, "saved": saved, **found.bases.tally}

    @staticmethod
    def _end_first(found: _Session, under_way: deque[_Sent], end: Callable[[_Session, _Sent], None]) -> int:
        sent = under_way.popleft()
        message = sent.message
        if sent.told is not None:
            found.groups.finish(sent.told, message.peer, message.reads[0].name, sidecar=True)
        found.groups.finish(sent.work, message.peer, message.reads[0].name)
        end(found, sent)
        return message.bytes

    def release(self, session: str) -> None:
        """Destroy a pair's groups."""
        found = self._sessions.pop(session, None)
        if found is not None:
            found.groups.close()


class P2pSource(_End):
    """A training rank's half."""

    def open(
        self,
        session: str,
        reads: Sequence[Sequence[Sequence[Read]]],
        firsts: Sequence[int],
        how: Mapping[str, Any],
        seconds: float,
    ) -> None:
        """Make the groups, with all other ranks, and note what this rank sends.

        firsts: place of each engine's rank 0 among all ranks.
        """
        mine = [
            (first + rank, read)
            for first, engine in zip(firsts, reads, strict=True)
            for rank, some in enumerate(engine)
            for read in some
            if read.block.rank == self._rank
        ]
        self._open(session, self._rank, mine, how, seconds)

    def send(self, session: str, seconds: float, base: str = "", version: str = "") -> dict[str, int]:
        """Send all that this rank owns to whoever needs it; returns once every rank has everything.

        base/version: of the base that all ranks hold, "" for none; and of these weights, "" where no base is kept.
        Returns what `DeltaTransfer` counts.
        """
        tensors: dict[str, torch.Tensor] = {}
        bodies: dict[int, torch.Tensor] = {}
        last = -1

        def ready() -> None:
            self._weights.fence()
            tensors.update(self._weights.tensors())

        def packed(message: Message, place: torch.device) -> torch.Tensor:
            buffer = torch.empty(message.bytes, dtype=torch.uint8, device=place)
            with torch.no_grad():
                for read, part in message.views(buffer):
                    part.copy_(read_view(tensors[read.block.storage], read))
            return buffer

        def begin(found: _Session, message: Message) -> _Sent:
            nonlocal last
            bucket, told = message.order[0], None
            if not version:
                body = packed(message, found.store)
            else:
                if bucket != last:  # messages of the same bytes stand in one bucket
                    bodies.clear()
                    last = bucket
                if message.content not in bodies:
                    new, build = packed(message, found.keep), bool(base)
                    sent = found.bases.outgoing(message.content, new, message.layout, build=build)
                    bodies[message.content] = sent.to(found.store)
                body = bodies[message.content]
                told = found.groups.tell(body.numel(), message.peer, bucket)
            return _Sent(message, body, found.groups.send(body, message.peer, bucket), told)

        return self._exchange(session, seconds, (base, version), ready, begin, lambda found, sent: None)


class P2pSink(_End):
    """An inference rank's half."""

    def open(
        self, session: str, reads: Sequence[Sequence[Read]], first: int, how: Mapping[str, Any], seconds: float
    ) -> None:
        """Make the groups, with all other ranks, and note what this rank receives.

        first: place of its engine's rank 0 among all ranks.
        """
        mine = [(read.block.rank, read) for read in reads[self._rank]]
        self._open(session, first + self._rank, mine, how, seconds)

    def receive(self, session: str, seconds: float, base: str = "", version: str = "") -> tuple[int, float]:
        """Receive all that this rank needs and copy it into place; returns bytes, and the seconds that copying took.

        base/version: as the trainer's ranks were told.
        """
        spent = 0.0

        def begin(found: _Session, message: Message) -> _Sent:
            length, at = message.bytes, message.order[0]
            if version:
                length = found.groups.told(message.peer, at, message.reads[0].name)
                if not 0 <= length <= message.bytes or (length < message.bytes and not base):
                    text = f"{length} bytes were announced for {message.bytes} of weights, with base {base or 'none'}"
                    raise TransferError(text, phase="wire")
            if version and length == message.bytes and found.keep == found.store == torch.device("cpu"):
                buffer = found.bases.room(message.content, length)
            else:
                buffer = torch.empty(length, dtype=torch.uint8, device=found.store)
            return _Sent(message, buffer, found.groups.receive(buffer, message.peer, at))

        def end(found: _Session, sent: _Sent) -> None:
            nonlocal spent
            begun, message, data = time.perf_counter(), sent.message, sent.buffer
            if version and data.numel() == message.bytes:
                found.bases.keep(message.content, data.to(found.keep))
            elif version:
                data = found.bases.part(message.content)
                delta.patch(data, sent.buffer.to(found.keep), message.layout)
            self._weights.apply(Piece(read.name, tuple(read.start), view) for read, view in message.views(data))
            spent += time.perf_counter() - begun

        return self._exchange(session, seconds, (base, version), lambda: None, begin, end)["bytes"], spent


class P2pTransfer(DeltaTransfer):
    """Driver's half. Options: `backend`, `host`, `bucket_mb`, `delta` and `verify`."""

    PLUGIN = "p2p"
    BUCKET_MB = 256

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__(name, options)
        self._store: Store | None = None
        self._generation = 0

    async def move(self, plan: TransferPlan, update: Update, meter: Any, *, deadline: float) -> None:
        """Let all ranks send and receive; waits begin when all engines have paused, so a deadline is the moving's own.

        After a failure the next update makes new groups.
        """
        self._check_kind(plan, update)
        ready = self._take_ready(plan)
        with meter.phase("gather"):
            base = await self._agree(deadline=deadline) if ready else ""
            if not ready:
                await self._open(plan, deadline)
        with meter.phase("wire"):
            how: dict[str, Any] = {"seconds": margin(deadline), "deadline": deadline, "base": base}
            how["version"] = str(update.version) if self.delta != "off" and update.kind == "full" else ""
            calls = [self._call(self.source, "send", **how)]
            calls += [self._call(sink, "receive", **how) for sink in self.sinks]
            sent, *received = await together(calls)
        self._count(sent)
        meter.bytes += self.tally["bytes"]
        copying = max(spent for engine in received for _, spent in engine)
        meter.seconds["wire"] -= copying
        meter.seconds["load"] += copying
        await self._verify(plan, update, meter, deadline=deadline)
        self._set_ready(plan)

    async def _open(self, plan: TransferPlan, deadline: float) -> None:
        """Make new groups on all ranks, under a name of their own in the store."""
        places = await together(self._call(h, "where", deadline=deadline) for h in [self.source, *self.sinks])
        names = self._rank_names([len(ranks) for ranks in places])
        backend = _backend([place for ranks in places for place in ranks], str(self.options.get("backend", "auto")))
        if self._store is None:
            self._store = Store(str(self.options.get("host") or "127.0.0.1"))
        self._generation += 1
        how: dict[str, Any] = {"names": names, "backend": backend, "window": _BUCKETS * self.bucket_bytes}
        how |= {"host": self._store.host, "port": self._store.port, "prefix": f"{self.session}/{self._generation}"}
        how |= {"delta": self.delta}
        firsts = [sum(len(ranks) for ranks in places[: 1 + e]) for e in range(len(self.sinks))]
        rest: dict[str, Any] = {"how": how, "seconds": margin(deadline), "deadline": deadline}
        calls = [self._call(self.source, "open", reads=plan.reads, firsts=firsts, **rest)]
        calls += [
            self._call(sink, "open", reads=reads, first=first, **rest)
            for sink, reads, first in zip(self.sinks, plan.reads, firsts, strict=True)
        ]
        await together(calls)

    async def close(self) -> None:
        """Destroy the groups on all ranks, then the store."""
        await super().close()
        if self._store is not None:
            self._store.close()
            self._store = None


def _backend(places: Sequence[tuple[str, str]], wanted: str) -> str:
    """Choose what carries weights; places: (kind of device, card) of all ranks.

    NCCL takes no two ranks on one card, so where two share one gloo is taken, or NCCL refused if it was asked for.
    """
    kinds = {kind for kind, _ in places}
    cards = [card for _, card in places if card]
    twice = len(set(cards)) < len(cards)
    if wanted == "auto":
        kind = kinds.pop() if len(kinds) == 1 and not twice else "cpu"
        return _BACKENDS.get(kind, "gloo")
    if wanted == "nccl" and (kinds != {"cuda"} or twice):
        where = "two of them are on one card" if kinds == {"cuda"} else f"they are on {', '.join(sorted(kinds))}"
        message = f"backend=nccl needs every rank on a card of its own, and {where}; use backend=gloo"
        raise TransferError(message, phase="gather")
    return wanted
