"""Copies out of another process's memory, worked out once and run many times: what `powertrain.tensors.direct` runs."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from powertrain.tensors.copies import CopyProgram, Pair

CHUNK: Final = 8 << 20
"""Most bytes of one system call; between two a rank looks at its deadline."""
SCRATCH: Final = 2 << 20
"""Bytes of the buffer on the way to places that are no runs of the same dtype; it stays in the cache."""
SHORT: Final = 512
"""Bytes below which a run is not worth an entry of its own in a system call."""
_RUNS: Final = 1024
"""Runs that one system call takes on either side."""
_THREADS: Final = 2
SPACE: Final = 1 << 52
"""Bytes of address space that are counted for each trainer's rank, in addresses that tell the rank too."""
RANKS: Final = 1 << 10

LIBC: Final = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_ARRAY: Final = (ctypes.c_void_p, ctypes.c_ulong)
if LIBC is not None:
    LIBC.process_vm_readv.restype = ctypes.c_ssize_t
    LIBC.process_vm_readv.argtypes = [ctypes.c_int, *_ARRAY, *_ARRAY, ctypes.c_ulong]
    LIBC.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def read_memory(process: int, local: int, locals_: int, remote: int, remotes: int) -> int:
    """Read another process's memory; returns bytes, which are fewer where a run cannot be read, or -errno.

    local, remote: addresses of arrays of (address, bytes), both int64, with `locals_` and `remotes` rows.
    """
    if LIBC is None:
        return -errno.ENOSYS
    done = int(LIBC.process_vm_readv(process, local, locals_, remote, remotes, 0))
    return done if done >= 0 else -ctypes.get_errno()


class Unread(Exception):
    """A run could not be read. address: of its first byte that is missing, with the rank's space."""

    def __init__(self, address: int, reason: str) -> None:
        super().__init__(reason)
        self.address, self.reason = address, reason


@dataclass(frozen=True, slots=True)
class _Step:
    """What is read at one go from one rank.

    remote, local: runs there and here, int64 [n, 2] (address, bytes), in one order. target: where it goes by the buffer
    and local is None, the place that the remote runs, then of equal length, make up in their order; dtype: theirs.
    """

    rank: int
    bytes: int
    remote: torch.Tensor
    local: torch.Tensor | None
    target: torch.Tensor | None = None
    dtype: torch.dtype | None = None


class DirectProgram(CopyProgram):
    """Stands in a sink's `Prepared` for the copies of pieces in this process.

    pairs: (target, source), where a source's first element stands at its rank's space plus its address there.
    processes: by rank. short: bytes that are read in short runs.
    """

    def __init__(self, pairs: Iterable[Pair], processes: Sequence[int]) -> None:
        super().__init__(())
        self._processes = processes
        self._steps: list[_Step] = []
        self.short = 0
        self.look: Callable[[], None] = lambda: None
        runs: dict[int, list[tuple[torch.Tensor, torch.Tensor, int]]] = {}
        for pair in pairs:
            target, source = _in_order(*pair)
            run, item = _run(source), source.element_size()
            common = min(run, _run(target))
            self.short += source.nbytes if run * item < min(SHORT, source.nbytes) else 0
            alike = target.device.type == "cpu" and target.dtype == source.dtype
            if alike and (common == run or common * item >= SHORT):
                here = _starts(target, common, target.data_ptr())
                there = _starts(source, common, source.storage_offset() * item)
                runs.setdefault(int(there[0]) // SPACE, []).append((here, there, common * item))
            else:
                self._steps += map(_buffered, _slabs(target, source))
        for rank, parts in runs.items():
            self._steps += _direct(rank, parts)

    def run(self) -> None:
        """Read everything, by two threads where torch may use as many; complete when it returns."""
        steps, faults = iter(self._steps), list[BaseException]()
        size = sum(step.bytes for step in self._steps)

        def work() -> None:
            scratch = torch.empty(0, dtype=torch.uint8)
            try:
                for step in steps:
                    if faults:
                        return
                    self.look()
                    if step.target is not None and scratch.numel() < step.bytes:
                        scratch = torch.empty(max(step.bytes, SCRATCH), dtype=torch.uint8)
                    self._take(step, scratch)
            except BaseException as exc:  # noqa: BLE001 - raised below, in the caller's thread
                faults.append(exc)

        more = min(_THREADS, torch.get_num_threads()) - 1 if size > 2 * CHUNK else 0
        threads = [threading.Thread(target=work, name="powertrain-direct", daemon=True) for _ in range(more)]
        for thread in threads:
            thread.start()
        work()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]

    def _take(self, step: _Step, scratch: torch.Tensor) -> None:
        count = len(step.remote)
        each = step.bytes // count  # bytes of a run, where they go through the buffer
        for begin in range(0, count, _RUNS):
            rows = min(_RUNS, count - begin)
            remote = step.remote.data_ptr() + 16 * begin
            if step.local is None:
                size = rows * each
                local = torch.tensor([[scratch.data_ptr() + begin * each, size]])
                done = read_memory(self._processes[step.rank], local.data_ptr(), 1, remote, rows)
            else:
                size = step.bytes
                done = read_memory(self._processes[step.rank], step.local.data_ptr(), count, remote, rows)
            if done != size:
                ends = step.remote[begin : begin + rows, 1].cumsum(0)
                at = int((ends <= max(done, 0)).sum())
                reason = os.strerror(-done) if done < 0 else f"{done} of {size} bytes came"
                raise Unread(step.rank * SPACE + int(step.remote[begin + at, 0]), reason)
        if step.target is not None:
            assert step.dtype is not None
            with torch.no_grad():
                step.target.copy_(scratch[: step.bytes].view(step.dtype).view(step.target.shape))


def _in_order(target: torch.Tensor, source: torch.Tensor) -> Pair:
    """Return both without dimensions of size 1, and those left in the order of the source's memory."""
    target, source = target.squeeze(), source.squeeze()
    order = sorted(range(source.dim()), key=lambda axis: -source.stride(axis))
    return target.permute(order), source.permute(order)


def _run(tensor: torch.Tensor) -> int:
    """Return how many elements lie in one run."""
    run = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != run:
            break
        run *= size
    return run


def _starts(tensor: torch.Tensor, run: int, first: int) -> torch.Tensor:
    """Return the addresses of a tensor's runs of `run` elements; first: address of its first element."""
    starts, left = torch.tensor([first]), tensor.numel() // run
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if left == 1:
            break
        starts = (starts[:, None] + torch.arange(size) * (stride * tensor.element_size())).reshape(-1)
        left //= size
    return starts


def _slabs(target: torch.Tensor, source: torch.Tensor) -> Iterator[Pair]:
    """Cut a pair along its first dimensions into parts that the buffer holds."""
    if source.nbytes <= SCRATCH:
        yield target, source
        return
    rows = max(1, SCRATCH // (source.nbytes // source.shape[0]))
    for begin in range(0, source.shape[0], rows):
        count = min(rows, source.shape[0] - begin)
        parts = target.narrow(0, begin, count), source.narrow(0, begin, count)
        yield from _slabs(parts[0][0], parts[1][0]) if rows == 1 else [parts]


def _buffered(pair: Pair) -> _Step:
    target, source = pair
    run, item = _run(source), source.element_size()
    starts = _starts(source, run, source.storage_offset() * item)
    remote = torch.stack([starts % SPACE, torch.full_like(starts, run * item)], dim=1)
    return _Step(int(starts[0]) // SPACE, source.nbytes, remote, None, target, source.dtype)


def _direct(rank: int, parts: Sequence[tuple[torch.Tensor, torch.Tensor, int]]) -> Iterator[_Step]:
    """Yield steps of at most `_RUNS` runs and about `CHUNK` bytes; parts: (addresses here, there, bytes of each)."""
    here, there = (torch.cat([part[side] for part in parts]) for side in (0, 1))
    sizes = torch.cat([torch.full_like(part[0], part[2]) for part in parts])
    cuts = (sizes + CHUNK - 1) // CHUNK
    which = torch.repeat_interleave(torch.arange(len(sizes)), cuts)
    ahead = (torch.arange(len(which)) - (cuts.cumsum(0) - cuts)[which]) * CHUNK
    lengths = (sizes[which] - ahead).clamp(max=CHUNK)
    local = torch.stack([here[which] + ahead, lengths], dim=1)
    remote = torch.stack([there[which] % SPACE + ahead, lengths], dim=1)
    ends, begin, before = lengths.cumsum(0), 0, 0
    while begin < len(lengths):
        reached = int(torch.searchsorted(ends, before + CHUNK, right=True))
        end = min(begin + _RUNS, max(reached, begin + 1))
        yield _Step(rank, int(ends[end - 1]) - before, remote[begin:end], local[begin:end])
        begin, before = end, int(ends[end - 1])
