"""Losses cross the driver's border by name: "module:function" plus plain config; this is the function's contract.

    def my_loss(inputs: LossInputs, config: Mapping[str, Any]) -> LossOutput: ...

A loss sees one value for each scored token, never logits (they may be sharded) and never the shape of a batch, so it
cannot depend on how sequences were dealt to ranks and micro-batches. The engine adds up weights * terms over all
tokens of all ranks and divides by the batch's one denominator. Scored tokens are those behind the prompt whose weight
is not 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from powertrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss may look at, T scored tokens of one micro-batch in no promised order.

    logprobs: float32 [T], with gradient, under the step's temperature. entropy: float32 [T] with gradient, or None when
    the loss did not ask for it. fields: token fields, and sample fields spread over their sequence's tokens, [T].
    weights: float32 [T]; the engine applies them, a loss need not.
    """

    logprobs: Tensor
    entropy: Tensor | None
    fields: Mapping[str, Tensor]
    weights: Tensor

    def need(self, name: str) -> Tensor:
        """Return a field; ConfigError listing what there is when the batch does not carry it."""
        if name not in self.fields:
            message = (
                f"the loss needs the field {name!r}; the batch carries: {', '.join(sorted(self.fields)) or 'none'}"
            )
            raise ConfigError(message)
        return self.fields[name]


@dataclass(frozen=True, slots=True)
class LossOutput:
    """terms: float32 [T] with gradient, one loss term a token. metrics: name -> [T] without gradient.

    A metric whose name ends in `_max` is reduced by max over all scored tokens of the step, others by their plain mean.
    """

    terms: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


Loss = Callable[[LossInputs, Mapping[str, Any]], LossOutput]


def load_loss(name: str) -> Loss:
    """Import a loss by "module:function"; ConfigError when there is none or it cannot be called."""
    try:
        found = _named(name)
    except ImportError as exc:
        message = f"loss {name!r} cannot be imported: {exc}"
        raise ConfigError(message) from exc
    if not callable(found):
        message = f"loss {name!r} is a {type(found).__name__}, not a function"
        raise ConfigError(message)
    return found


def _named(path: str) -> Any:
    """Import `"module:Attribute"` and return the attribute; ConfigError for a malformed text.

    Import errors pass through unchanged, so that a missing dependency names itself.
    """
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        message = f"{path!r} is not of the form 'module:Attribute'"
        raise ConfigError(message)
    found: Any = import_module(module)
    for step in attribute.split("."):
        try:
            found = getattr(found, step)
        except AttributeError as exc:
            message = f"module {module!r} has no attribute {attribute!r}"
            raise ConfigError(message) from exc
    return found


def check_output(output: LossOutput, count: int, name: str) -> LossOutput:
    """Return `output` if it has one term and one value of every metric for each of `count` tokens; else ConfigError."""
    if not isinstance(output, LossOutput):
        message = f"loss {name!r} returned {type(output).__name__}; it must return a LossOutput"
        raise ConfigError(message)
    for label, value in {"terms": output.terms, **output.metrics}.items():
        if tuple(value.shape) != (count,):
            message = f"loss {name!r}: {label} has shape {tuple(value.shape)} for {count} scored tokens"
            raise ConfigError(message)
    return output


def cross_entropy(inputs: LossInputs, config: Mapping[str, Any]) -> LossOutput:
    """Negative log-likelihood of the scored tokens; takes no config. Metric: `nll`."""
    if config:
        message = f"cross_entropy takes no config, got {', '.join(config)}"
        raise ConfigError(message)
    terms = -inputs.logprobs
    return LossOutput(terms, {"nll": terms.detach()})


@dataclass(slots=True)
class MetricSums:
    """Adds up metrics over micro-batches and then over ranks, in float64."""

    count: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, metrics: Mapping[str, Tensor], count: int) -> None:
        """Take one micro-batch of `count` scored tokens."""
        self.count += count
        if not count:
            return
        for name, value in metrics.items():
            plain = value.detach()
            if name.endswith("_max"):
                self.maxima[name] = max(self.maxima.get(name, float("-inf")), float(plain.max()))
            else:
                self.sums[name] = self.sums.get(name, 0.0) + float(plain.sum(dtype=torch.float64))

    def merge(self, other: MetricSums) -> None:
        """Add what another rank has seen."""
        self.count += other.count
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, float("-inf")), value)

    def results(self) -> dict[str, float]:
        """Return means over all scored tokens, and maxima, by name."""
        means = {name: value / self.count for name, value in self.sums.items()} if self.count else {}
        return dict(sorted({**means, **self.maxima}.items()))
