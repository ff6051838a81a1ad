"""Shm's direct path: an engine's rank reads the trainer's ranks' own memory, by the system call `process_vm_readv`.

One copy in place of two. Each trainer's rank offers where its blocks lie, and a random token that lies in its memory
too; a sink reads the tokens first, so that a rank of another process, or one that it may not read, is found out before
any weight is touched. Then it works out once which bytes go where: whole runs go straight into place, all else (casts,
transposed or finely strided places) through a small buffer. The trainer does nothing meanwhile but stay as it is.
"""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from powertrain.errors import TransferError
from powertrain.interfaces.weights import Piece
from powertrain.tensors.direct_copies import LIBC, RANKS, SHORT, SPACE, DirectProgram, Unread, read_memory
from powertrain.tensors.sink import BoxSink, Prepared, dtype_name
from powertrain.tensors.views import device_of

if TYPE_CHECKING:
    from powertrain.interfaces.weights import WeightSink, WeightSource
    from powertrain.weights import TransferPlan
    from powertrain.weights.plan import Block, Read

_TOKEN: Final = 16
_PR_SET_PTRACER: Final = 0x59616D61
_ANY: Final = (1 << 64) - 1


# ---- the trainer's side
@dataclass(slots=True)
class _Offered:
    """A pair's blocks of this rank, the processes that may read them, and the token."""

    blocks: Sequence[Block]
    readers: Sequence[int]
    token: torch.Tensor


class Offers:
    """What a training rank offers, by session."""

    def __init__(self, weights: WeightSource, rank: int) -> None:
        self._weights, self._rank = weights, rank
        self._offered: dict[str, _Offered] = {}

    def make(self, session: str, blocks: Sequence[Block] | None, readers: Sequence[int]) -> dict[str, Any] | str:
        """Return `process`, `token`, `at` (its address) and `addresses` (int64, of this rank's blocks, in their order).

        Every write so far has reached memory by then. blocks: all of the plan, None to look again where they lie.
        Returns the reason where weights cannot be read from outside.
        """
        if blocks is not None:
            mine = [block for block in blocks if block.rank == self._rank]
            token = torch.frombuffer(bytearray(secrets.token_bytes(_TOKEN)), dtype=torch.uint8)
            self._offered[session] = _Offered(mine, list(readers), token)
        found = self._offered.get(session)
        if found is None:
            return "the trainer was started again"
        self._weights.fence()
        tensors = self._weights.tensors()
        addresses = _addresses(tensors, found.blocks)
        if isinstance(addresses, bytes) and blocks is not None:
            again = self._weights.tensors()  # beside the first ones, which live yet
            if _addresses(again, found.blocks) != addresses:
                return "the trainer makes the tensors that it sends anew each time"
        if isinstance(addresses, str):
            return addresses
        self._allow()
        token = found.token
        return {
            "process": os.getpid(),
            "token": bytes(token.tolist()),
            "at": token.data_ptr(),
            "addresses": addresses,
        }

    def release(self, session: str) -> None:
        """Take an offer back."""
        if self._offered.pop(session, None) is not None:
            self._allow()

    def _allow(self) -> None:
        """Let readers read where the kernel asks for that (yama, scope 1): one process, or any if there are more."""
        readers = {process for offered in self._offered.values() for process in offered.readers}
        if LIBC is not None:  # fails where there is no yama, which then does not ask
            LIBC.prctl(_PR_SET_PTRACER, _ANY if len(readers) > 1 else next(iter(readers), 0), 0, 0, 0)


def _addresses(tensors: Mapping[str, torch.Tensor], blocks: Iterable[Block]) -> bytes | str:
    found = array("q")
    for block in blocks:
        tensor = tensors[block.storage]
        if tensor.device.type != "cpu" or dtype_name(tensor.dtype) != block.dtype:
            return f"{block.storage!r} is {dtype_name(tensor.dtype)} on {tensor.device.type}"
        address, item = tensor.data_ptr() + block.place * tensor.element_size(), tensor.element_size()
        if address % item:
            return f"{block.storage!r} lies across the bounds of its elements"
        found.append(address)
    return found.tobytes()


def addresses_by_read(plan: TransferPlan, offers: Sequence[Mapping[str, Any]]) -> list[list[bytes]]:
    """Return for each engine and rank where the blocks of its reads lie, int64; called by the driver."""
    tables = [iter(array("q", offer["addresses"])) for offer in offers]
    where = {id(block): next(tables[block.rank]) for block in plan.blocks}
    return [
        [array("q", [where[id(read.block)] for read in reads]).tobytes() for reads in ranks] for ranks in plan.reads
    ]


# ---- the engine's side
@dataclass(slots=True)
class _Aimed:
    """What a sink's rank reads, from where, and the copies worked out from that."""

    reads: Sequence[Read]
    addresses: array[int]
    offers: Sequence[Mapping[str, Any]]
    prepared: Prepared
    program: DirectProgram


class Aims:
    """What an inference rank reads directly, by session. Its rank must be the only one in its process."""

    def __init__(self, weights: WeightSink) -> None:
        self._weights = weights
        self._aimed: dict[str, _Aimed] = {}

    def aim(
        self, session: str, reads: Sequence[Read], addresses: bytes, offers: Sequence[Mapping[str, Any]]
    ) -> str | None:
        """Check that the trainer can be read and work out the copies; returns the reason where it is not to be."""
        sink = self._weights
        if not isinstance(sink, BoxSink) or device_of(sink).type != "cpu":
            return "the engine's weights are not in host memory"
        entries = sink.manifest().by_name()
        if any(read.name in entries and entries[read.name].transform not in {"", "transpose"} for read in reads):
            return "the engine converts weights by itself"
        ranks = {read.block.rank for read in reads}
        if len(offers) > RANKS:
            return f"the trainer has more than {RANKS} ranks"
        for rank in sorted(ranks):
            reason = _unreadable(offers[rank])
            if reason:
                return f"trainer rank {rank} cannot be read: {reason}"
        prepared, program = _prepare(sink, reads, array("q", addresses), [offer["process"] for offer in offers])
        if program.short > 1 << 20:
            return f"{program.short} bytes lie in runs of less than {SHORT}"
        self._aimed[session] = _Aimed(reads, array("q", addresses), offers, prepared, program)
        return None

    def take(self, session: str, look: Callable[[], None]) -> int:
        """Read everything into place; returns bytes. look: is called between chunks, and raises to end it.

        Raises TransferError where a trainer's rank cannot be read any more, naming it and the tensor.
        """
        found = self._aimed[session]
        sink = self._weights
        assert isinstance(sink, BoxSink)
        for rank in sorted({read.block.rank for read in found.reads}):
            reason = _unreadable(found.offers[rank])
            if reason:
                message = f"trainer rank {rank} cannot be read any more: {reason}"
                raise TransferError(message, phase="load")
        found.program.look = look
        try:
            if not sink.replay(found.prepared):
                processes = [offer["process"] for offer in found.offers]
                found.prepared, found.program = _prepare(sink, found.reads, found.addresses, processes)
                found.program.look = look
                done = sink.replay(found.prepared)
                assert done, "storages moved while their pieces were prepared"
        except Unread as exc:
            rank, address = divmod(exc.address, SPACE)
            places = zip(found.reads, found.addresses, strict=True)
            before = [(place, read.name) for read, place in places if read.block.rank == rank and place <= address]
            name = max(before)[1] if before else "?"
            message = (
                f"trainer rank {rank} could not be read for {name!r}: {exc.reason}; it has died or freed its weights"
            )
            raise TransferError(message, phase="load") from exc
        return sum(read.bytes for read in found.reads)

    def release(self, session: str) -> None:
        """Forget what was worked out."""
        self._aimed.pop(session, None)


def _unreadable(offer: Mapping[str, Any]) -> str:
    """Return why a rank's memory cannot be read, "" where its token is found in it."""
    if offer["process"] == os.getpid():
        return "it is in the engine's own process"
    seen = torch.zeros(_TOKEN, dtype=torch.uint8)
    local, remote = torch.tensor([[seen.data_ptr(), _TOKEN]]), torch.tensor([[offer["at"], _TOKEN]])
    done = read_memory(offer["process"], local.data_ptr(), 1, remote.data_ptr(), 1)
    if done < 0:
        return os.strerror(-done)
    return "" if bytes(seen.tolist()) == bytes(offer["token"]) else "its token is not there, so it is another process"


def _prepare(
    sink: BoxSink, reads: Sequence[Read], addresses: Sequence[int], processes: Sequence[int]
) -> tuple[Prepared, DirectProgram]:
    """Let the sink check the pieces and say where they go; their sources are tensors without memory of their own."""
    spaces: dict[str, torch.Tensor] = {}

    def pieces() -> Iterator[Piece]:
        for read, address in zip(reads, addresses, strict=True):
            block = read.block
            dtype = getattr(torch, block.dtype)
            if block.dtype not in spaces:
                spaces[block.dtype] = torch.empty(RANKS * SPACE // dtype.itemsize, dtype=dtype, device="meta")
            ahead = sum((at - own) * n for at, own, n in zip(read.start, block.start, block.stride, strict=True))
            place = (block.rank * SPACE + address) // dtype.itemsize + ahead
            yield Piece(read.name, read.start, torch.as_strided(spaces[block.dtype], read.size, block.stride, place))

    prepared = sink.prepare(pieces())
    program = DirectProgram(prepared.program.pairs, processes)
    return replace(prepared, program=program), program
