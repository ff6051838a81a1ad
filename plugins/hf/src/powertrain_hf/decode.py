"""Batched decoding: each distinct prompt is prefilled once, its KV cache repeated, finished rows dropped."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from powertrain.tensors.sampling import draw, uniforms

if TYPE_CHECKING:
    from powertrain.tensors.head import LMHead
    from powertrain.tensors.rows import Row

DROP_SHARE = 0.25
"""Finished rows are dropped once they are this share of the batch; dropping copies the caches of the others."""
SHARED_MIN = 8
"""Fewest tokens at the start of all prompts that are prefilled apart, once."""


class RoomyLayer(DynamicLayer):
    """A cache layer with room set aside for the tokens to come: a step writes one column in place of copying all."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new columns; returns all keys and values so far as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        used = self.get_seq_length()
        total = used + key_states.shape[-2]
        if not self._buffers or self._buffers[0].shape[-2] < total:
            old = [self.keys, self.values] if used else []
            self._room = max(self._room, total)
            self._buffers = [
                new.new_empty(*new.shape[:2], self._room, new.shape[-1]) for new in (key_states, value_states)
            ]
            for buffer, held in zip(self._buffers, old, strict=False):
                buffer[..., :used, :] = held
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., used:total, :] = new
        self.keys, self.values = (buffer[..., :total, :] for buffer in self._buffers)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows that are named, in that order; a row may be named several times."""
        used = self.get_seq_length()
        picked = []
        for buffer in self._buffers:
            new = buffer.new_empty(len(beam_idx), *buffer.shape[1:])
            new[..., :used, :] = buffer[..., :used, :].index_select(0, beam_idx)
            picked.append(new)
        self._buffers = picked
        self.keys, self.values = (buffer[..., :used, :] for buffer in picked)


class Decoder:
    """The state of one batch between decode steps. All methods run on the engine's compute thread."""

    def __init__(self, model: Any, head: LMHead) -> None:
        self._body = getattr(model, model.base_model_prefix)
        self._config = model.config
        # transformers 5.2x renames the argument and warns about the old name.
        self._cache_name = "cache" if "cache" in signature(type(self._body).forward).parameters else "past_key_values"
        self._head = head
        self._rows: list[Row] = []

    @torch.inference_mode()
    def prefill(self, rows: list[Row]) -> None:
        """Make the batch's caches from scratch over prompt and tokens so far, under the weights as they are now."""
        self._rows = list(rows)
        device = self._body.get_input_embeddings().weight.device
        places: dict[tuple[int, ...], int] = {}
        index = [places.setdefault((*row.prompt, *row.tokens), len(places)) for row in rows]
        texts = list(places)
        room = max(map(len, texts)) + max(row.request.sampling.max_tokens - len(row.tokens) for row in rows)
        self._cache = DynamicCache(config=self._config)
        self._cache.layers = [RoomyLayer(room) if type(la) is DynamicLayer else la for la in self._cache.layers]
        shared = self._prefill_shared(texts, device)
        ids, mask = _left_padded([text[shared:] for text in texts])
        self._padded = bool((mask == 0).any())
        self._mask = torch.cat([mask.new_ones(len(texts), shared), mask], dim=1).to(device)
        positions = (self._mask.cumsum(1) - 1).clamp_(min=0)[:, shared:]
        self._logits = self._forward(ids.to(device), positions)
        self._next = positions[:, -1:] + 1
        if index != list(range(len(texts))):
            self._select(torch.tensor(index, device=device))
        self._set_sampling()

    @torch.inference_mode()
    def step(self) -> list[Row]:
        """Draw one token for every live row and return the rows that ended; then make ready for the next step."""
        device = self._logits.device
        at = np.fromiter((len(row.tokens) for row in self._rows), dtype=np.uint64, count=len(self._rows))
        uniform = torch.from_numpy(uniforms(self._keys, at)).to(device)
        tokens, logprobs, plain = draw(self._logits, self._temperature, self._top_k, self._top_p, uniform)
        ended: list[Row] = []
        for row, *drawn in zip(self._rows, tokens.tolist(), logprobs.tolist(), plain.tolist(), strict=True):
            if not row.finish:
                row.take(*drawn)
                if row.finish:
                    ended.append(row)
        self._last = tokens[:, None]
        if self._compact():
            self._advance()
        return ended

    @property
    def live(self) -> list[Row]:
        """Rows that have not ended."""
        return [row for row in self._rows if not row.finish]

    def drop(self) -> None:
        """Free the caches; `prefill` makes new ones."""
        self._cache = self._logits = None

    def _compact(self) -> bool:
        """Drop finished rows where it pays; False when none is left."""
        keep = [i for i, row in enumerate(self._rows) if not row.finish]
        if keep and len(self._rows) - len(keep) >= max(1, DROP_SHARE * len(self._rows)):
            self._rows = [self._rows[i] for i in keep]
            index = torch.tensor(keep, device=self._logits.device)
            self._last = self._last[index]
            self._select(index)
            self._set_sampling()
        return bool(keep)

    def _advance(self) -> None:
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._rows), 1)], dim=1)
        self._logits = self._forward(self._last, self._next)
        self._next = self._next + 1

    def _prefill_shared(self, texts: list[tuple[int, ...]], device: torch.device) -> int:
        """Prefill what all texts begin with (a system prompt) once for all; returns its length, 0 when not worth it."""
        least = min(map(len, texts)) - 1
        columns = enumerate(zip(*texts, strict=False))
        shared = next((i for i, column in columns if i >= least or len(set(column)) > 1), least)
        # In a layer with a sliding window, padding between prefix and rest would take places of the window.
        if len(texts) == 1 or shared < SHARED_MIN or not all(type(la) is RoomyLayer for la in self._cache.layers):
            return 0
        ids = torch.tensor([texts[0][:shared]], device=device)
        self._hidden(ids, torch.arange(shared, device=device)[None], None)
        self._cache.reorder_cache(torch.zeros(len(texts), dtype=torch.long, device=device))
        return shared

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self._hidden(ids, positions, self._mask if self._padded else None)
        logits: Tensor = self._head.logits(hidden[:, -1])
        return logits

    def _hidden(self, ids: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        out = self._body(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_name: self._cache},
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def _select(self, index: Tensor) -> None:
        # Not batch_select_indices, which linear layers lack and mixed ones have for their keys and values alone.
        self._cache.reorder_cache(index)
        self._logits, self._mask, self._next = self._logits[index], self._mask[index], self._next[index]

    def _set_sampling(self) -> None:
        device = self._logits.device
        sampling = [row.request.sampling for row in self._rows]
        self._keys = np.array([row.key for row in self._rows], dtype=np.uint64)
        self._temperature = torch.tensor([s.temperature for s in sampling], dtype=torch.float32, device=device)
        self._top_k = torch.tensor([s.top_k for s in sampling], device=device)
        self._top_p = torch.tensor([s.top_p for s in sampling], dtype=torch.float32, device=device)


def _left_padded(texts: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return ids and mask, int64 [texts, longest], every text ending in the last column."""
    width = max(map(len, texts))
    ids = torch.zeros(len(texts), width, dtype=torch.long)
    mask = torch.zeros(len(texts), width, dtype=torch.long)
    for i, text in enumerate(texts):
        ids[i, width - len(text) :] = torch.tensor(text)
        mask[i, width - len(text) :] = 1
    return ids, mask
