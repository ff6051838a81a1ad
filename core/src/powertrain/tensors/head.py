"""The LM head of torch engines: log-probs and entropy from a float32 product, in one piece or in chunks.

`fp32` and `chunk` are independent. With `chunk`, no more than that many rows of logits exist at once and the backward
pass computes them again; without it they are kept for the backward pass. A weight that is not float32 is cast once in
a forward pass and once in a backward pass, for all chunks together, and no copy outlives the pass: a later write
into the weight, or another Parameter in its place, is seen by the next call. The parameter itself is never cast, so a
head tied to the embedding stays tied and keeps its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from powertrain.errors import ConfigError

_UNSUPPORTED = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier_scale")
"""Config fields of models that scale their logits in ways this head does not know."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """How logits are made: float32 product, rows at once, soft cap, temperature, and whether the entropy is wanted."""

    fp32: bool
    chunk: int | None
    softcap: float | None
    temperature: float
    entropy: bool

    def spans(self, rows: int) -> Iterator[tuple[int, int]]:
        step = self.chunk or max(rows, 1)
        for begin in range(0, rows, step):
            yield begin, min(begin + step, rows)

    def shaped(self, raw: Tensor) -> Tensor:
        """Return float32 logits: soft cap, then temperature. Never writes into `raw`."""
        logits = raw.float()
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap).mul_(self.softcap)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def unshaped(self, raw: Tensor, grad: Tensor) -> Tensor:
        """Turn the gradient of shaped logits into that of raw ones, in place."""
        if self.temperature != 1.0:
            grad.div_(self.temperature)
        if self.softcap is not None:
            grad.mul_(1 - torch.tanh(raw.float() / self.softcap).square_())
        return grad


class LMHead:
    """Projects hidden states onto the vocabulary and scores tokens.

    weight: called at every use, returns the [V, H] weight as it is then (a Parameter, tied or not). bias: likewise [V].
    fp32: product in float32 whatever the dtypes are; else in the weight's dtype, with the log-softmax in float32 still.
    chunk: rows of logits that may exist at once; None for all. softcap: `final_logit_softcapping` of the model.
    """

    def __init__(
        self,
        weight: Callable[[], Tensor],
        bias: Callable[[], Tensor | None] | None = None,
        *,
        fp32: bool = True,
        chunk: int | None = None,
        softcap: float | None = None,
    ) -> None:
        if chunk is not None and chunk < 1:
            message = f"the LM head's chunk is {chunk}; it must be at least 1, or None for all rows at once"
            raise ConfigError(message)
        self._weight = weight
        self._bias = bias or (lambda: None)
        self.fp32, self.chunk, self.softcap = fp32, chunk, softcap

    @classmethod
    def of(cls, model: Any, *, fp32: bool = True, chunk: int | None = None) -> LMHead:
        """Return the head of a transformers causal LM; reads its weight through the model at every use.

        ConfigError for a model that scales its logits in a way this head does not know, and for a head that is not a
        plain linear layer (a LoRA adapter on it, for one).
        """
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        for name in _UNSUPPORTED:
            if getattr(config, name, None) not in (None, 1, 1.0):
                message = (
                    f"{type(model).__name__} scales its logits ({name}={getattr(config, name)}); this LM head cannot"
                )
                raise ConfigError(message)
        module = model.get_output_embeddings()
        if module is None or getattr(module, "weight", None) is None or hasattr(module, "base_layer"):
            message = (
                f"the output layer of {type(model).__name__} is {type(module).__name__}, not a plain linear layer; "
                "leave it out of the LoRA targets, or use another model"
            )
            raise ConfigError(message)
        return cls(
            lambda: model.get_output_embeddings().weight,
            lambda: getattr(model.get_output_embeddings(), "bias", None),
            fp32=fp32,
            chunk=chunk,
            softcap=getattr(config, "final_logit_softcapping", None),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [..., V] of hidden [..., H]: for the few positions that are sampled from."""
        rule = _Rule(self.fp32, None, self.softcap, 1.0, entropy=False)
        with torch.autocast(hidden.device.type, enabled=False):
            return rule.shaped(self._project(hidden, self._weight(), self._bias(), self.fp32))

    def score(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs [K] of `targets` [K] and, if asked for, the entropies [K]; float32, with gradients.

        hidden: [U, H]. rows: int64 [K], the row of `hidden` that predicts each target (a prompt's last position
        predicts the first token of every completion); None when U = K and they match one to one. Nothing of size [K, V]
        is made beyond the chunk. ConfigError for a temperature that is not above 0.
        """
        if not temperature > 0:
            message = f"log-probs at temperature {temperature}: it must be above 0"
            raise ConfigError(message)
        rule = _Rule(self.fp32, self.chunk, self.softcap, float(temperature), entropy)
        if rows is None:
            rows = torch.arange(len(targets), device=targets.device)
        with torch.autocast(hidden.device.type, enabled=False):
            logprobs, entropies = _Score.apply(hidden, self._weight(), self._bias(), rows, targets, rule)
        return logprobs, entropies if entropy else None

    @staticmethod
    def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, fp32: bool) -> Tensor:
        """The product with the whole vocabulary; nobody outside this module makes it for a full sequence."""
        dtype = torch.float32 if fp32 else weight.dtype
        return linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


class _Score(torch.autograd.Function):
    """log p(target) and entropy; logits are made again in the backward pass when they came in chunks."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, targets: Tensor, rule: _Rule
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float32 if rule.fp32 else weight.dtype
        cast = weight.to(dtype)
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        normal = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty(len(hidden) if rule.entropy else 0, dtype=torch.float32, device=hidden.device)
        kept = None
        for begin, end in rule.spans(len(hidden)):
            raw = LMHead._project(hidden[begin:end], cast, bias, rule.fp32)
            logits = rule.shaped(raw)
            normal[begin:end] = torch.logsumexp(logits, -1)
            chosen = _within(rows, begin, end)
            logprobs[chosen] = logits[rows[chosen] - begin, targets[chosen]] - normal[rows[chosen]]
            if rule.entropy:
                shifted = logits - normal[begin:end, None]
                entropies[begin:end] = -(shifted.exp() * shifted).sum(-1)
            kept = raw if rule.chunk is None else None
        ctx.save_for_backward(hidden, weight, bias, rows, targets, normal, entropies)
        ctx.rule = rule
        ctx.kept = kept if any(ctx.needs_input_grad[:3]) else None
        return logprobs, entropies[rows] if rule.entropy else entropies

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Any, ...]:
        with torch.autocast(grad_logprobs.device.type, enabled=False):
            return _backward(ctx, grad_logprobs, grad_entropies)


def _within(rows: Tensor, begin: int, end: int) -> Tensor:
    return ((rows >= begin) & (rows < end)).nonzero()[:, 0]


def _backward(ctx: Any, grad_logprobs: Tensor, grad_entropies: Tensor) -> tuple[Any, ...]:
    hidden, weight, bias, rows, targets, normal, entropies = ctx.saved_tensors
    rule: _Rule = ctx.rule
    wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    dtype = torch.float32 if rule.fp32 else weight.dtype
    need_weight = wants_hidden or ctx.kept is None
    cast = weight.to(dtype) if need_weight else weight
    # All targets of one row share its softmax: the row's weight is the sum of their gradients.
    total = torch.zeros_like(normal).index_add_(0, rows, grad_logprobs.float())
    pull = torch.zeros_like(normal).index_add_(0, rows, grad_entropies.float()) if rule.entropy else None
    grad_hidden = torch.empty_like(hidden) if wants_hidden else None
    grad_weight = grad_bias = None
    for begin, end in rule.spans(len(hidden)):
        raw, ctx.kept = ctx.kept, None
        if raw is None:
            raw = LMHead._project(hidden[begin:end], cast, bias, rule.fp32)
        shifted = rule.shaped(raw) - normal[begin:end, None]
        grad = shifted.exp()
        if pull is None:
            grad.mul_(-total[begin:end, None])
        else:  # dH/dz = -p (log p + H)
            shifted.add_(entropies[begin:end, None]).mul_(pull[begin:end, None]).add_(total[begin:end, None])
            grad.mul_(shifted).neg_()
        chosen = _within(rows, begin, end)
        grad.index_put_((rows[chosen] - begin, targets[chosen]), grad_logprobs[chosen].float(), accumulate=True)
        grad = rule.unshaped(raw, grad)
        if wants_bias:
            part = grad.sum(0)
            grad_bias = part if grad_bias is None else grad_bias.add_(part)
        grad = grad.to(dtype)
        if grad_hidden is not None:
            grad_hidden[begin:end] = grad @ cast
        if wants_weight:
            grad_weight = _accumulate(grad_weight, grad, hidden[begin:end].to(dtype), whole=end - begin == len(hidden))
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None else grad_bias.to(bias.dtype),
        None,
        None,
        None,
    )


def _accumulate(total: Tensor | None, grad: Tensor, hidden: Tensor, *, whole: bool) -> Tensor:
    """Add grad^T hidden to a float32 total, in one fused product where the dtypes allow it."""
    if whole:
        return grad.T @ hidden
    if total is None:
        total = torch.zeros(grad.shape[1], hidden.shape[1], dtype=torch.float32, device=grad.device)
    if grad.dtype == torch.float32:
        return total.addmm_(grad.T, hidden)
    return total.add_(grad.T @ hidden)
