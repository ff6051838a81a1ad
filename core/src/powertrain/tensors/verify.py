"""The check after a load, by the option `verify`: both sides sum up what they hold, and the driver compares.

A rank finds each tensor by its own manifest, not by the plan, so that an error in the plan is found too. The trainer
casts to the engine's dtype first. The sum is made on the tensor's own device, of whole numbers, so it is the same on
every kind of device. Tensors that the engine converts by itself (quantised, say) are left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from powertrain.errors import TransferError
from powertrain.interfaces.transfer import Endpoint
from powertrain.tensors.views import block_view
from powertrain.weights.ranges import overlap, text

if TYPE_CHECKING:
    from powertrain.interfaces.weights import WeightSink, WeightSource
    from powertrain.weights import Manifest, TransferPlan

Wanted = tuple[str, str, tuple[int, ...], tuple[int, ...], str, bool]
"""Name of a tensor here and at the trainer, start and size of a range as the trainer counts them, dtype to cast to
("" for none), and whether dimensions are in reverse order here.
"""

_WORDS: Final = 1 << 20
"""Words of 8 bytes that are summed up at once."""
_FACTOR: Final = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio, odd: the factors of neighbouring words differ in many bits."""
_MASK: Final = (1 << 64) - 1


def checksum(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a checksum of a name and a tensor's bytes in row-major order, as an int64 scalar on its device.

    Each word of 8 bytes counts times an odd factor of its place, modulo 2^64, so one wrong word always shows.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.tensor(zlib.crc32(name.encode()), dtype=torch.int64, device=data.device)
    factors = torch.arange(min(_WORDS, data.numel() // 8 + 1), dtype=torch.int64, device=data.device) * 2 + 1
    for begin in range(0, data.numel(), 8 * _WORDS):
        part = data[begin : begin + 8 * _WORDS]
        if part.numel() % 8 or part.storage_offset() % 8:
            part = torch.nn.functional.pad(part, (0, -part.numel() % 8)).clone()
        words = part.view(torch.int64)
        total = total * _FACTOR + (words * (factors[: len(words)] * _FACTOR)).sum()
    return total


def checksums(weights: WeightSource | WeightSink, wanted: Sequence[Wanted]) -> list[int]:
    """Return the checksum of each wanted range; TransferError for one that this rank does not hold."""
    entries, tensors = weights.manifest().by_name(), weights.tensors()
    sums = []
    with torch.no_grad():
        for name, label, start, size, dtype, reverse in wanted:
            turn = -1 if reverse else 1
            place = (tuple(start)[::turn], tuple(size)[::turn])
            for box in entries[name].boxes if name in entries else ():
                if overlap(place, (box.start, box.size)) == place:
                    view = block_view(tensors[box.storage], box.place(place[0]), place[1], box.stride)
                    break
            else:
                message = f"{name!r}{text(place)} is to be verified, and rank {weights.manifest().rank} has it nowhere"
                raise TransferError(message, phase="load")
            view = view.permute(tuple(range(view.dim())[::turn]))
            sums.append(checksum(label, view.to(getattr(torch, dtype)) if dtype else view).cpu())
    return [int(one) for one in sums]


class Checked(Endpoint):
    """An endpoint of core's transfers: its weights can be verified, and it ends session by session.

    _sessions: what it keeps for each pair that it serves, by the pair's session.
    """

    _weights: Any
    _sessions: Collection[str] = ()

    def release(self, session: str) -> None:
        """Free what is kept for a pair; may be called for one that is not known."""

    def close(self) -> None:
        """Free what is kept for every pair."""
        for session in list(self._sessions):
            self.release(session)

    def checksums(self, session: str, wanted: Sequence[Sequence[Wanted]]) -> list[int]:
        """Return the checksums of what is wanted of this rank; wanted: by rank."""
        return checksums(self._weights, wanted[self._weights.manifest().rank])


@dataclass(frozen=True, slots=True)
class Comparison:
    """What both sides are asked for: `source` by rank, `sinks` by engine and rank.

    pairs: what must be equal, as (engine, rank, place in its list, trainer's rank, place in its list).
    """

    source: list[list[Wanted]]
    sinks: list[list[list[Wanted]]]
    pairs: list[tuple[int, int, int, int, int]]

    @classmethod
    def of(cls, plan: TransferPlan, manifests: Sequence[Sequence[Manifest]]) -> Comparison:
        """Work it out for every read of a plan; manifests: of the trainer's ranks, then of each engine's."""
        made = cls([[] for _ in manifests[0]], [[[] for _ in engine] for engine in plan.reads], [])
        known: dict[tuple[Any, ...], int] = {}
        for e, engine in enumerate(plan.reads):
            for r, reads in enumerate(engine):
                entries = manifests[1 + e][r].by_name()
                for read in reads:
                    entry, block = entries[read.name], read.block
                    if entry.transform not in {"", "transpose"}:
                        continue
                    asked: Wanted = (block.name, block.name, read.start, read.size, entry.dtype, False)
                    if (block.rank, *asked) not in known:
                        known[block.rank, *asked] = len(made.source[block.rank])
                        made.source[block.rank].append(asked)
                    made.pairs.append((e, r, len(made.sinks[e][r]), block.rank, known[block.rank, *asked]))
                    reverse = entry.transform == "transpose"
                    made.sinks[e][r].append((read.name, block.name, read.start, read.size, "", reverse))
        return made

    def faults(
        self, source: Sequence[Sequence[int]], sinks: Sequence[Sequence[Sequence[int]]]
    ) -> Iterator[tuple[int, str]]:
        """Yield (engine, what is wrong) for every range whose checksums differ."""
        for e, r, at, rank, there in self.pairs:
            mine, theirs = sinks[e][r][at] & _MASK, source[rank][there] & _MASK
            if mine != theirs:
                name, _, start, size, _, _ = self.sinks[e][r][at]
                sums = f"checksum {mine:016x} on its rank {r}, {theirs:016x} on trainer rank {rank}"
                yield e, f"{name!r}{text((start, size))} has {sums}"
