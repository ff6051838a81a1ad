"""Losses that the training suite names: one that uses all a loss may see, and three that misbehave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.tensors.loss import LossInputs, LossOutput

MODULE = __name__


def policy(inputs: LossInputs, config: Mapping[str, Any]) -> LossOutput:
    """Advantage times log-prob, scaled for each sample, less an entropy bonus of `entropy_weight`."""
    from powertrain.tensors.loss import LossOutput

    terms = -inputs.logprobs * inputs.need("advantages") * inputs.need("scale")
    if inputs.entropy is not None:
        terms = terms - config["entropy_weight"] * inputs.entropy
    return LossOutput(terms, {"seen": inputs.need("scale").detach(), "scale_max": inputs.need("scale").detach()})


def infinite(inputs: LossInputs, config: Mapping[str, Any]) -> LossOutput:
    """A loss that is not finite."""
    from powertrain.tensors.loss import LossOutput

    del config
    return LossOutput(inputs.logprobs * float("inf"))


def raising(inputs: LossInputs, config: Mapping[str, Any]) -> LossOutput:
    """A loss that raises."""
    del inputs, config
    message = "the reward model is on fire"
    raise ZeroDivisionError(message)
