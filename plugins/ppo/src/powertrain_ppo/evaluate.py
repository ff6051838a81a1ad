"""Evaluation: greedy answers to every held-out row, none left out and none twice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.interfaces.data import SamplingParams
from powertrain_ppo.rollouts import Generate, judged, requests

if TYPE_CHECKING:
    from powertrain_ppo.prompts import Prompts
    from powertrain_ppo.rewards import Reward


async def evaluate(
    rows: Sequence[Mapping[str, Any]],
    *,
    name: str,
    generate: Generate,
    texts: Prompts,
    reward: Reward,
    check: Reward | None,
    max_tokens: int,
    batch: int,
    adapter: str | None,
) -> dict[str, float]:
    """Return `eval/accuracy`, `eval/reward`, `eval/tokens` (mean length) and `eval/rows` over exactly `rows`.

    batch: rows in one request batch; the last one may be smaller, nothing is filled up. check: says if a completion
    is right (1 or more counts); without it the reward does. A completion that was lost counts as wrong.
    """
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=texts.stop_ids)
    right = tokens = 0
    rewards: list[float] = []
    for start in range(0, len(rows), batch):
        part = list(enumerate(rows[start : start + batch], start=start))
        encoded = [texts.encode(row) for _, row in part]
        asked = requests([(f"{name}-{i}", ids) for (i, _), ids in zip(part, encoded, strict=True)], sampling, adapter)
        samples, _ = await judged(part, encoded, await generate(asked), texts=texts, reward=reward)
        verdicts = [sample.reward for sample in samples]
        if check is not None:
            verdicts = await check([(s.record, s.text, s.completion.tokens.tolist()) for s in samples])
        right += sum(verdict >= 1.0 for verdict in verdicts)
        rewards += [sample.reward for sample in samples]
        tokens += sum(len(sample.completion.tokens) for sample in samples)
    count = len(rows)
    return {
        "eval/accuracy": right / count,
        "eval/reward": math.fsum(rewards) / len(rewards) if rewards else math.nan,
        "eval/tokens": tokens / count,
        "eval/rows": count,
    }
