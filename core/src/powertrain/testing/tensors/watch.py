"""Seeing what goes on inside an engine of this process: names that reach a module's forward, memory that is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def forward_names() -> Iterator[set[str]]:
    """Collect the keyword names, and the texts among the keys of mappings, that any torch module is called with.

    Applies to all threads of the process while it is open. Empty afterwards: the model is not in this process.
    """
    import torch

    seen: set[str] = set()
    plain = torch.nn.Module.__call__

    @functools.wraps(plain)
    def call(module: Any, *args: Any, **named: Any) -> Any:
        seen.add(type(module).__name__)
        for value in (named, *args, *named.values()):
            if isinstance(value, dict):
                seen.update(key for key in value if isinstance(key, str))
        return plain(module, *args, **named)

    torch.nn.Module.__call__ = call
    try:
        yield seen
    finally:
        torch.nn.Module.__call__ = plain


def made_by(work: Callable[[], Any]) -> int:
    """Return how many elements of new tensors `work` makes on this thread; views of what is there count as none."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    total = 0

    class Counting(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal total
            given = {leaf.data_ptr() for leaf in args if isinstance(leaf, torch.Tensor)}
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.data_ptr() not in given:
                total += result.numel()
            return result

    with Counting():
        work()
    return total
