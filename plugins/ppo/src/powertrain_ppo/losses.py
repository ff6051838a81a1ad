"""Policy losses; the only module of this package that imports torch, inside the training engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from powertrain.tensors.loss import LossInputs, LossOutput


def grpo(inputs: LossInputs, config: Mapping[str, Any]) -> LossOutput:
    """Clipped policy gradient with advantages from groups (PPO's surrogate, Schulman et al. 2017, equation 7).

    Fields: `advantages`; `old_logprobs`, the inference engine's under the sampling distribution; `fresh`, 1 where the
    sampling weights are the ones being trained. config: clip_low, clip_high. Term of a token:
    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) with ratio = exp(logprob - old_logprob).

    Metrics: `mismatch` and `mismatch_max`, |logprob - old_logprob| where fresh (the mean is over all tokens; divide it
    by the share of fresh ones); `ratio`, `clip_fraction`, `approx_kl` (ratio - 1 - log ratio); `entropy` on request.
    """
    advantages, old = inputs.need("advantages"), inputs.need("old_logprobs")
    fresh = inputs.need("fresh")
    difference = inputs.logprobs - old
    ratio = difference.exp()
    clipped = ratio.clamp(1.0 - float(config["clip_low"]), 1.0 + float(config["clip_high"]))
    terms = -torch.minimum(ratio * advantages, clipped * advantages)
    with torch.no_grad():
        gap = difference.abs() * fresh
        metrics = {
            "mismatch": gap,
            "mismatch_max": gap,
            "ratio": ratio.detach(),
            "clip_fraction": (clipped * advantages < ratio * advantages).float(),
            "approx_kl": ratio.detach() - 1.0 - difference.detach(),
        }
        if inputs.entropy is not None:
            metrics["entropy"] = inputs.entropy.detach()
    return LossOutput(terms, metrics)
