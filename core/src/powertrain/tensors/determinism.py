"""Determinism in a torch process: seeds and switches, set before a model or a process group is made.

Variables (`CUBLAS_WORKSPACE_CONFIG`, `PYTHONHASHSEED`, ...) belong to the worker's environment before exec; here they
are only checked, and set where that still has an effect. Libraries read the switches once, at construction, so
`enable` comes first in every build and refuses to come late.
"""

from __future__ import annotations

import os
import random
from typing import Any, Final

import torch

from powertrain.errors import ConfigError

CUBLAS: Final = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_VALUES: Final = (":4096:8", ":16:8")
"""Workspace settings under which cuBLAS is deterministic (cuBLAS documentation, "Results Reproducibility")."""


def seed_all(seed: int, rank: int = 0) -> None:
    """Seed Python's, numpy's and torch's generators (all devices) with `seed + rank`.

    Called on every rank: with rank 0 everywhere before anything that all ranks must draw alike (adapter weights), with
    the own rank afterwards.
    """
    import numpy as np

    value = (seed + rank) % 2**32
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(seed + rank)


def enable(device: str = "cpu") -> None:
    """Turn every switch on, before construction: deterministic algorithms, cuDNN, no TF32, no atomic attention.

    An existing `CUBLAS_WORKSPACE_CONFIG` that is deterministic is kept. ConfigError when it is another one, or when
    CUDA was already used without one, since cuBLAS reads it at its first handle.
    """
    if device == "cuda":
        given = os.environ.get(CUBLAS)
        if given is not None and given not in CUBLAS_VALUES:
            message = f"{CUBLAS} is {given!r}; determinism needs {' or '.join(CUBLAS_VALUES)}"
            raise ConfigError(message)
        if given is None and torch.cuda.is_initialized():
            message = f"{CUBLAS} is not set and CUDA is in use already; set it to {CUBLAS_VALUES[0]} before the start"
            raise ConfigError(message)
        os.environ.setdefault(CUBLAS, CUBLAS_VALUES[0])
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory only hides reads of it, which torch's own operations do not do, and costs a pass each time.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    # Its backward adds with atomics; flash attention has a deterministic one, the plain kernel always is.
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def observed() -> dict[str, Any]:
    """Return what a library would see if it read the switches now; engines record it before construction."""
    return {
        CUBLAS: os.environ.get(CUBLAS),
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED"),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "mem_efficient_attention": torch.backends.cuda.mem_efficient_sdp_enabled(),
    }


def check(device: str = "cpu") -> None:
    """Raise ConfigError naming every switch that is not on, from inside the process that computes."""
    seen = observed()
    wanted = {
        "deterministic_algorithms": True,
        "cudnn_deterministic": True,
        "cudnn_benchmark": False,
        "matmul_tf32": False,
        "cudnn_tf32": False,
        "mem_efficient_attention": False,
    }
    wrong = [f"{name} is {seen[name]}, must be {value}" for name, value in wanted.items() if seen[name] != value]
    if device == "cuda" and seen[CUBLAS] not in CUBLAS_VALUES:
        wrong.append(f"{CUBLAS} is {seen[CUBLAS]!r}, must be {' or '.join(CUBLAS_VALUES)}")
    if wrong:
        message = "determinism is not on: " + "; ".join(wrong)
        raise ConfigError(message)
