"""Draws inside vLLM's workers: each is fixed by its row's key and its place in the sequence, whatever else is batched.

vLLM's own sampler tells log-probs either before or after temperature and cuts, not both, and its seeded draws depend on
how many were made before: a row that is taken out for an update and comes back would draw otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from powertrain.tensors.sampling import draw, uniforms_on
from powertrain_vllm.backend import HOTTEST, drawn_by, other

if TYPE_CHECKING:
    from torch import Tensor


class KeyedSampler(Sampler):  # type: ignore[misc]
    """Stands in the model runner's place for a sampler.

    A row of ours, by the name of its request, gets two log-probs per token: under the token's id the one at
    temperature 1, and under `other(token)` the one of the distribution it was drawn from. Rows of others get what
    they asked for.
    """

    def __init__(self, runner: Any, vocabulary: int) -> None:
        super().__init__(runner.sampler.logprobs_mode)
        self._runner, self._vocabulary = runner, vocabulary
        self._read: dict[str, tuple[int, float] | None] = {}
        self._told: tuple[Tensor, Tensor] | None = None

    def sample(self, logits: Tensor, metadata: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Draw a token for each row of float32 logits [R, V]; returns int64 [R], and no log-probs yet."""
        rows, device = logits.shape[0], logits.device

        def given(values: Tensor | None, default: float, dtype: torch.dtype) -> Tensor:
            found = torch.full((rows,), default, device=device) if values is None else values
            return found.to(dtype)

        top_k = given(metadata.top_k, 0, torch.int64)
        top_k = torch.where(top_k >= logits.shape[1], 0, top_k)  # vLLM writes "off" as the size of the vocabulary
        for processor in () if metadata.all_greedy else metadata.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        temperature = given(metadata.temperature, 0.0, torch.float32)
        temperature = torch.where(temperature < 1e-5, 0.0, temperature)
        ours = self._ours(rows)
        for row, (_, own) in ours.items():
            if own > HOTTEST:
                temperature[row] = own
        top_p = given(metadata.top_p, 1.0, torch.float32)
        tokens, *told = draw(logits, temperature, top_k, top_p, self._uniforms(ours, rows, device))
        self._told = told[0], told[1]
        return tokens, None

    def _uniforms(self, ours: dict[int, tuple[int, float]], rows: int, device: torch.device) -> Tensor:
        keys = [ours[row][0] if row in ours else 0 for row in range(rows)]
        lengths = self._runner.seq_lens
        lengths = getattr(lengths, "gpu", lengths)[:rows].to(device, torch.int64)
        numbers = uniforms_on(torch.tensor(keys, device=device), lengths)
        if len(ours) < rows:  # requests of others
            free = torch.rand(rows, dtype=torch.float64, device=device)
            numbers = torch.where(_marked(ours, rows, device), numbers, free)
        return numbers

    def _ours(self, rows: int) -> dict[int, tuple[int, float]]:
        """Return row -> key and temperature of the rows that are ours; each name is read once."""
        names = self._runner.input_batch.req_ids[:rows]
        if any(name not in self._read for name in names):
            self._read = {name: drawn_by(name) for name in names}
        return {row: found for row, name in enumerate(names) if (found := self._read[name]) is not None}

    def compute_logprobs(self, logits: Tensor) -> Tensor:  # type: ignore[override]
        """Leave this to `gather_logprobs`, which knows whose rows they are."""
        return logits

    def gather_logprobs(self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:  # type: ignore[override]
        """Return log-probs of the tokens drawn; logprobs: what `compute_logprobs` returned, logits [R, V]."""
        told, self._told = self._told, None
        if told is None or len(told[0]) != len(token_ids):  # of prompts, not of draws
            return Sampler.gather_logprobs(Sampler.compute_logprobs(logprobs), num_logprobs, token_ids)
        drawn, plain = told
        both = torch.stack([plain, drawn], 1)
        ids = torch.stack([token_ids, other(token_ids, self._vocabulary)], 1).to(torch.int32)
        ranks = torch.zeros_like(token_ids)
        ours = self._ours(len(token_ids))
        if len(ours) == len(token_ids):
            return LogprobsTensors(ids, both, ranks)
        found = Sampler.gather_logprobs(Sampler.compute_logprobs(logprobs), max(num_logprobs, 1), token_ids)
        pick = _marked(ours, len(token_ids), token_ids.device)[:, None]
        all_ids, all_logprobs = found.logprob_token_ids.clone(), found.logprobs.clone()
        all_ids[:, :2] = torch.where(pick, ids, all_ids[:, :2])
        all_logprobs[:, :2] = torch.where(pick, both, all_logprobs[:, :2])
        return LogprobsTensors(all_ids, all_logprobs, found.selected_token_ranks)


def _marked(ours: Iterable[int], rows: int, device: torch.device) -> Tensor:
    """Return bool [rows], true where a row is ours."""
    found = torch.zeros(rows, dtype=torch.bool)
    found[list(ours)] = True
    return found.to(device)
