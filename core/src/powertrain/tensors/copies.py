"""Copies worked out once and run many times: pairs of tensors become as few kernels as the device allows.

On CUDA, contiguous pairs of one dtype are cut into chunks of equal size that one Triton kernel copies, whatever the
number of tensors; measured on an H200 it takes 1.08 times the time of one plain copy of the same bytes, where a copy
for each tensor takes 1.7 times it (benchmarks/transfer). Without a working Triton the same pairs go through torch's
multi-tensor copy, as 4-byte words. Casts and strided blocks are copied one by one.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import torch

_LOG: Final = logging.getLogger("powertrain.copies")
CHUNK_BYTES: Final = 1 << 16
"""Bytes that one program of the kernel copies: small enough to fill every multiprocessor evenly."""

_RUN_BYTES: Final = 1 << 16
"""Bytes from which a copy in host memory is worth a call of the C library."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""(target, source) of equal shape."""


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor into one of equal shape; to or from a card it may be under way yet when this returns.

    Where one thread copies a whole run of host memory, the C library does it: torch reads every line of the target
    before it writes it, and takes up to 1.6 times as long (benchmarks/transfer). Pageable memory is read at once.
    """
    alike = target.device.type == "cpu" == source.device.type and target.dtype == source.dtype
    runs = alike and target.is_contiguous() and source.is_contiguous()
    if runs and target.nbytes >= _RUN_BYTES and torch.get_num_threads() == 1:
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source, non_blocking=True)


class CopyProgram:
    """Runs the same copies again and again. The tensors' memory must stay where it is; `run` does not look.

    pairs: (target, source), equal in shape, targets disjoint. bytes: what one run writes.
    """

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self._single: list[Pair] = []
        fused: list[Pair] = []
        self.bytes = 0
        for target, source in pairs:
            self.bytes += target.nbytes
            if target.numel():
                (fused if _fusible(target, source) else self._single).append((target, source))
        self._fused = _fuse(fused)
        self.on_device = bool(fused) or any(t.is_cuda or s.is_cuda for t, s in self._single)

    @property
    def pairs(self) -> Sequence[Pair]:
        """What is copied one by one; all, where nothing is on a device."""
        return self._single

    def run(self) -> None:
        """Copy everything; on a device it is queued on the current stream, so synchronise before telling anybody."""
        with torch.no_grad():
            for launch in self._fused:
                launch()
            for target, source in self._single:
                copy_into(target, source)


def _fusible(target: torch.Tensor, source: torch.Tensor) -> bool:
    """True for a pair that is one run of whole words in one device's memory on both sides."""
    alike = target.is_cuda and target.device == source.device and target.dtype == source.dtype
    words = target.data_ptr() % 8 == source.data_ptr() % 8 == target.nbytes % 8 == 0
    return alike and words and target.is_contiguous() and source.is_contiguous()


def _fuse(pairs: Sequence[Pair]) -> list[Callable[[], object]]:
    """Return functions without arguments that queue the copies of all pairs, one for each device."""
    devices = sorted({target.device.index for target, _ in pairs})
    launches: list[Callable[[], object]] = []
    for device in devices:
        mine = [(target, source) for target, source in pairs if target.device.index == device]
        try:
            launches.append(_ChunkLaunch(mine))
        except Exception as exc:  # noqa: BLE001 - whatever Triton raises on a host without a compiler; slower is right
            _LOG.warning("weights are copied without the fused kernel, which does not work here: %s", exc)
            words = [[tensor.view(-1).view(torch.int32) for tensor in side] for side in zip(*mine, strict=True)]
            launches.append(partial(torch._foreach_copy_, *words))
    return launches


class _ChunkLaunch:
    """The kernel's table on the device: for each chunk its two addresses and its number of 8-byte words."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        from powertrain.tensors.copy_kernel import copy_chunks

        self._kernel = copy_chunks
        self._device = pairs[0][0].device
        runs = [(target.data_ptr(), source.data_ptr(), target.nbytes) for target, source in pairs]
        rows = [
            (target + at, source + at, min(CHUNK_BYTES, size - at) // 8)
            for target, source, size in runs
            for at in range(0, size, CHUNK_BYTES)
        ]
        self._count = len(rows)
        self._table = torch.tensor(rows, dtype=torch.int64).t().contiguous().to(self._device)
        copy_chunks(self._table[:, :0], 0)

    def __call__(self) -> None:
        with torch.cuda.device(self._device):
            self._kernel(self._table, self._count)
