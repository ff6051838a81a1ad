"""The Triton kernel behind `powertrain.tensors.copies`; imported on use, since Triton is there on GPU hosts alone."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096
WARPS = 8


@triton.jit
def _copy(targets, sources, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Program i copies words[i] 8-byte words from address sources[i] to address targets[i]."""
    chunk = tl.program_id(0)
    target = tl.load(targets + chunk).to(tl.pointer_type(tl.int64))
    source = tl.load(sources + chunk).to(tl.pointer_type(tl.int64))
    count = tl.load(words + chunk)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, count, BLOCK):
        inside = (start + lanes) < count
        # Every byte is read once: it need not push others out of the cache.
        value = tl.load(source + start + lanes, mask=inside, eviction_policy="evict_first")
        tl.store(target + start + lanes, value, mask=inside)


def copy_chunks(table: torch.Tensor, count: int) -> Any:
    """Queue `count` chunks on the current stream. table: int64 [3, n] on the device: targets, sources, words.

    A count of 0 compiles the kernel on an empty chunk, so that a host where it cannot be compiled is found out early.
    """
    if count == 0:
        table = torch.zeros(3, 1, dtype=torch.int64, device=table.device)
        count = 1
    return _copy[(count,)](table[0], table[1], table[2], BLOCK=BLOCK, num_warps=WARPS)
