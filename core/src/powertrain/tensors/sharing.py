"""Whether a sink's storages could be the sender's own memory, so that an update in one process moves no byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from powertrain.interfaces.weights import Piece
    from powertrain.weights import Box, Manifest


def lent(
    manifest: Manifest, tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece]
) -> dict[str, torch.Tensor] | None:
    """Return storage -> the sender's memory that is laid out alike, for all storages with boxes; None unless for all.

    tensors: the sink's storages. pieces: what arrives, by the sink's names. A storage that boxes do not cover wholly
    is not lent, for nobody knows what lies in its gaps at the sender; nor is any where an entry names a transform.
    """
    if any(entry.transform for entry in manifest):
        return None
    found: dict[str, torch.Tensor] = {}
    covered: Counter[str] = Counter()
    for entry in manifest:
        for box in entry.boxes:
            whole = _around(pieces.get(entry.name), tensors[box.storage], box)
            if whole is None or found.setdefault(box.storage, whole).data_ptr() != whole.data_ptr():
                return None
            covered[box.storage] += box.elements
    return found if all(covered[name] == tensor.numel() for name, tensor in found.items()) else None


def _around(piece: Piece | None, mine: torch.Tensor, box: Box) -> torch.Tensor | None:
    """Return the memory in which a piece lies as its box does in `mine`; None where there is none."""
    if piece is None or piece.tensor.dtype != mine.dtype or piece.tensor.device != mine.device:
        return None
    if (piece.start, tuple(piece.tensor.shape), piece.tensor.stride()) != (box.start, box.size, box.stride):
        return None
    first = piece.tensor.storage_offset() - box.offset
    last = first + sum((n - 1) * stride for n, stride in zip(mine.shape, mine.stride(), strict=True))
    room = piece.tensor.untyped_storage().nbytes() // piece.tensor.element_size()
    return (
        torch.as_strided(piece.tensor.detach(), mine.shape, mine.stride(), first) if 0 <= first <= last < room else None
    )
