"""The LM head in float32: vLLM's own option where the version has it, else its product replaced in the model."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from powertrain.errors import ConfigError

ROWS = 3
TOLERANCE = 1e-4
"""Largest difference of the probe's logits from the float32 product, as a share of the largest logit."""


class Fp32Head:
    """Stands in the place of a head's `quant_method`: logits are float32 products of the weights as they are now.

    On a card inputs of 16 bits are multiplied with float32 sums and results, as vLLM's own option does later.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 logits of hidden states x [..., H]."""
        weight = layer.weight
        if x.is_cuda and x.dtype in {torch.bfloat16, torch.float16} and weight.dtype == x.dtype:
            flat = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
            found = flat.reshape(*x.shape[:-1], -1)
        else:
            found = linear(x.float(), weight.float())
        return found if bias is None else found + bias.float()


def head_of(model: Any) -> Any:
    """Return the module whose weight makes logits; ConfigError where the model has none by a name that is known."""
    found = getattr(model, "lm_head", None)
    found = getattr(found, "base_layer", found)
    if not hasattr(found, "quant_method"):
        message = f"{type(model).__name__} has no `lm_head`, so its precision cannot be seen to; say head.fp32=false"
        raise ConfigError(message)
    return found


def install(model: Any) -> None:
    """Let a model of a version without `head_dtype` make its logits in float32."""
    head = head_of(model)
    if not isinstance(head.quant_method, Fp32Head):
        head.quant_method = Fp32Head(head.quant_method)


@torch.inference_mode()
def check(model: Any, dtype: torch.dtype, *, fp32: bool) -> float:
    """Hold the head to a product of its own weights; returns the largest difference as a share of the largest logit.

    ConfigError when logits are not of the dtype that was asked for, or, for float32, are rounded to 16 bits or not the
    product. All ranks of an instance call it together.
    """
    head = head_of(model)
    weight = head.weight
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, weight.shape[1], generator=generator).to(weight.device, dtype)
    logits = model.compute_logits(hidden)
    if logits is None:  # another rank of the instance has them all
        return 0.0
    wanted = torch.float32 if fp32 else dtype
    if logits.dtype != wanted:
        message = f"the LM head makes logits of {logits.dtype}, and {wanted} was asked for"
        raise ConfigError(message)
    processor = getattr(model, "logits_processor", None)
    processor = getattr(processor, "base_layer", processor)
    plain = getattr(processor, "scale", 1.0) == 1.0 and not getattr(processor, "soft_cap", None)
    if not fp32 or not plain or getattr(head, "tp_size", 1) > 1:
        return 0.0
    expected = linear(hidden.float(), weight.float())[:, : logits.shape[1]]
    apart = float((logits - expected).abs().max() / expected.abs().max())
    rounded = dtype != torch.float32 and bool((logits == logits.to(dtype).float()).all())
    if apart > TOLERANCE or rounded:
        what = "are rounded to 16 bits" if rounded else f"differ from the float32 product by {apart:.1e} of the largest"
        message = f"the LM head's logits {what}, though a float32 head was asked for"
        raise ConfigError(message)
    return apart
