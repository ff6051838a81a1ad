"""Losses that tests name by "module:function"; in a folder of their own so that children can import them."""

import torch

from powertrain.tensors.loss import LossOutput


def policy(inputs, config):
    """Uses all that a loss may use: token fields, spread sample fields, entropy and config."""
    terms = -inputs.logprobs * inputs.need("advantages") * inputs.need("scale")
    if inputs.entropy is not None:
        terms = terms - config.get("entropy", 0.01) * inputs.entropy
    shown = inputs.logprobs.detach()
    return LossOutput(terms, {"logprob": shown, "logprob_max": shown})


def explode(inputs, config):
    """Not finite on the sequences whose scale is the largest of the batch."""
    terms = -inputs.logprobs
    return LossOutput(torch.where(inputs.need("scale") >= config["limit"], terms * float("nan"), terms))


def infinite_gradient(inputs, config):
    """A finite loss whose gradient is not."""
    return LossOutput((inputs.logprobs - inputs.logprobs.detach()).abs().sqrt())


def fail(inputs, config):
    """Raises where the limit is met, so on one rank only."""
    if bool((inputs.need("scale") >= config["limit"]).any()):
        raise RuntimeError("boom")
    return policy(inputs, config)


def wrong_shape(inputs, config):
    return LossOutput(inputs.logprobs.sum())
