"""Rollouts: requests out, samples in, each sample with its group, its reward and the age of its tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from powertrain.errors import PowertrainError
from powertrain.interfaces.data import GenerateRequest, SamplingParams, TrainBatch
from powertrain_ppo.advantages import group_advantages

if TYPE_CHECKING:
    from powertrain.interfaces.data import Completion, GenerateResult
    from powertrain_ppo.prompts import Prompts
    from powertrain_ppo.rewards import Reward

Generate = Callable[[Sequence[GenerateRequest]], Awaitable[Sequence["GenerateResult"]]]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One completion. group: the prompt's position in the run, carried along and never worked out from row numbers."""

    group: int
    record: Mapping[str, Any]
    prompt: Sequence[int]
    completion: Completion
    text: str
    reward: float


@dataclass
class Rollout:
    """The samples of one step's batch. lost: completions that were aborted or empty; seconds: what it took."""

    step: int
    samples: list[Sample]
    lost: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(len(sample.completion.tokens) for sample in self.samples)


class Ages:
    """Which version has how many optimizer steps behind it, so that staleness is measured for each segment."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def published(self, version: str, steps: int) -> None:
        """Note that the weights under `version` have taken `steps` steps."""
        self._steps[version] = steps

    def of_tokens(self, completion: Completion, trained: int) -> list[int]:
        """Return each token's staleness: `trained` steps less those of the version that produced it."""
        ages: list[int] = []
        for segment in completion.segments:
            if segment.version not in self._steps:
                message = f"a segment carries weight version {segment.version!r}, which this run never published"
                raise PowertrainError(message)
            ages += [trained - self._steps[segment.version]] * (segment.end - segment.start)
        return ages


def requests(
    prompts: Sequence[tuple[str, Sequence[int]]], sampling: SamplingParams, adapter: str | None
) -> list[GenerateRequest]:
    """Return one request for each (id, prompt ids)."""
    import numpy as np

    return [
        GenerateRequest(request_id=name, prompt=np.asarray(ids, dtype=np.int64), sampling=sampling, adapter=adapter)
        for name, ids in prompts
    ]


async def judged(
    records: Sequence[tuple[int, Mapping[str, Any]]],
    encoded: Sequence[Sequence[int]],
    results: Sequence[GenerateResult],
    *,
    texts: Prompts,
    reward: Reward,
) -> tuple[list[Sample], int]:
    """Return the samples with their rewards, and how many completions were lost (aborted, or without a token)."""
    kept: list[tuple[int, Mapping[str, Any], Sequence[int], Completion, str]] = []
    lost = 0
    for (group, record), ids, result in zip(records, encoded, results, strict=True):
        for completion in result.completions:
            if completion.finish == "abort" or not len(completion.tokens):
                lost += 1
            else:
                kept.append((group, record, ids, completion, texts.decode(completion.tokens)))
    rewards = await reward([(record, text, completion.tokens.tolist()) for _, record, _, completion, text in kept])
    samples = [
        Sample(group=group, record=record, prompt=ids, completion=completion, text=text, reward=value)
        for (group, record, ids, completion, text), value in zip(kept, rewards, strict=True)
    ]
    return samples, lost


def training_batch(
    samples: Sequence[Sample],
    ages: Sequence[Sequence[int]],
    *,
    std: str,
    eps: float,
    skip_constant: bool = False,
) -> tuple[TrainBatch, list[float]]:
    """Return the batch that a step is taken on, and each sample's advantage.

    Token fields: `advantages`, `old_logprobs` (the inference engine's, under the sampling distribution) and `fresh`
    (1 where the token's staleness is 0). skip_constant: leave out groups without any advantage, but for the first
    group where there is no other; the denominator stays the number of all samples' tokens.
    """
    advantages = group_advantages([s.group for s in samples], [s.reward for s in samples], std=std, eps=eps)
    rows = list(zip(samples, advantages, ages, strict=True))
    tokens = sum(len(sample.completion.tokens) for sample in samples)
    if skip_constant:
        wanted = {sample.group for sample, advantage, _ in rows if advantage} or {samples[0].group}
        rows = [row for row in rows if row[0].group in wanted]
    batch = TrainBatch.from_sequences(
        [sample.prompt for sample, _, _ in rows],
        [sample.completion.tokens.tolist() for sample, _, _ in rows],
        token_fields={
            "advantages": [[advantage] * len(sample.completion.tokens) for sample, advantage, _ in rows],
            "old_logprobs": [sample.completion.logprobs.tolist() for sample, _, _ in rows],
            "fresh": [[float(age == 0) for age in row] for _, _, row in rows],
        },
        groups=[sample.group for sample, _, _ in rows],
    )
    return replace(batch, denominator=float(tokens)), advantages
