"""Rows without an adapter beside rows with one, on a CPU: vLLM would answer them with an adapter's weights."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

OPERATIONS = "vllm.lora.ops.torch_ops"
TAKERS = (f"{OPERATIONS}.lora_ops", OPERATIONS, "vllm.lora.punica_wrapper.punica_cpu")
"""Modules that have the operations by name."""
EXPANDING = ("bgmv_expand", "bgmv_expand_slice")
"""Operations by which an adapter's share is added; all others end in these."""


def mend() -> None:
    """Let what an adapter adds to a row without one be 0; called before a model is loaded, on a CPU.

    Such a row has the adapter number -1, and vLLM's operations in torch (up to 0.32) take that for an index: the row
    gets the adapter that lies last, once all places are taken, and says nothing. Kernels of cards pass over it.
    """
    import importlib

    for module in TAKERS:
        importlib.import_module(module)
    home = sys.modules[TAKERS[0]]
    for name in EXPANDING:
        plain = getattr(home, name)
        if getattr(plain, "mended", False):
            continue
        mended = _masked(plain)
        for module in TAKERS:
            if hasattr(sys.modules[module], name):
                setattr(sys.modules[module], name, mended)


def _masked(expand: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(expand)
    def masked(inputs: Any, weights: Any, output: Any, indices: Any, *rest: Any, **named: Any) -> Any:
        """inputs: [N, r], what the adapters' A made of the rows. indices: int [N], a row's adapter, -1 for none."""
        return expand(inputs.masked_fill((indices < 0)[:, None], 0), weights, output, indices, *rest, **named)

    masked.mended = True  # type: ignore[attr-defined]
    return masked
