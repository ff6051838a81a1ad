"""The environment of every process that powertrain starts, built in one place and whole before the process begins.

Order, weakest first: built-in defaults, what is inherited, launcher, backend's needs, recipe, facts (determinism,
rank, devices), the user's explicit mapping. The user's mapping always wins; where it contradicts a guarantee that
the same user asked for, that is an `EnvironmentConflictError` instead of a silent choice. Rank variables of the
parent's own world are never inherited.

Variables such as `PYTHONHASHSEED` and `CUBLAS_WORKSPACE_CONFIG` are read once, when an interpreter starts or a
library makes its first handle, so they belong into a worker's spec; `check_determinism` tells from inside the
started process whether they were there in time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from powertrain.errors import ConfigError, EnvironmentConflictError
from powertrain.options import shown

Layer = Mapping[str, Any]
"""Variable name -> value; values are text or numbers, numbers become text."""

_RANK_VARIABLE: Final = re.compile(
    r"(RANK|WORLD_SIZE|NODE_RANK|LOCAL_RANK|LOCAL_WORLD_SIZE|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|GROUP_.*|ROLE_.*|TORCHELASTIC_.*|PET_.*"
    r"|PMI_.*|PMIX_.*|OMPI_COMM_WORLD_.*|OMPI_UNIVERSE_SIZE|MPI_LOCAL.*|MV2_COMM_WORLD_.*|JSM_NAMESPACE_.*|PALS_.*"
    r"|SLURM_PROCID|SLURM_LOCALID|SLURM_NODEID|SLURM_GTIDS|SLURM_TASK_PID)"
)
_RENDEZVOUS: Final = frozenset({"MASTER_ADDR", "MASTER_PORT"})
_OWN: Final = frozenset({"POWERTRAIN_WORKER", "POWERTRAIN_STARTED_AGAIN"})
"""How powertrain's processes tell each other who they are."""
_HASH_SEED: Final = "PYTHONHASHSEED"
_PROMISES: Final[Mapping[str, tuple[str, Callable[[str], bool], str]]] = {
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", lambda value: value in {":4096:8", ":16:8"}, ":4096:8 or :16:8"),
    _HASH_SEED: ("0", lambda value: value.isdecimal() and int(value) < 2**32, "a fixed number from 0 to 4294967295"),
    "NCCL_ALGO": ("Ring", bool, "a named algorithm such as Ring"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0", lambda value: value == "0", "0"),
    "FLASH_ATTENTION_DETERMINISTIC": ("1", lambda value: value == "1", "1"),
}
"""Variables of determinism -> the value given when there is none, which others keep the promise too, in words."""


def is_rank_variable(name: str) -> bool:
    """Tell whether a variable says which rank of which world a process is (torchrun, MPI, Slurm and their kin)."""
    return _RANK_VARIABLE.fullmatch(name) is not None


def default_variables(*, cores: int | None = None, ranks_on_host: int = 1) -> dict[str, str]:
    """Return the built-in defaults: the host's cores shared out among its ranks, passive waiting, unbuffered output.

    cores: cores that this host may use (None: those of this process). ranks_on_host: processes that compute on it at
    the same time, of all engines. Waiting threads that spin cost a shared host most of its speed, hence PASSIVE.
    """
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "OMP_NUM_THREADS": str(max(1, cores // max(1, ranks_on_host))),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def rank_variables(
    rank: int, world: int, local_rank: int, local_world: int, master_addr: str, master_port: int
) -> dict[str, str]:
    """Return what `torch.distributed`'s env rendezvous reads; for training workers only.

    All ranks of one engine get the same address and port, each engine a port of its own.
    """
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
        message = f"rank {rank} of {world} (local {local_rank} of {local_world}) is outside its world"
        raise ConfigError(message)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }


def determinism_variables(seed: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return every variable that determinism needs, with values from `inherited` kept where they keep the promise.

    EnvironmentConflictError names each one in `inherited` that breaks it.
    """
    defaults = {name: default for name, (default, _, _) in _PROMISES.items()} | {_HASH_SEED: str(seed % 2**32)}
    values = {name: inherited.get(name, default) for name, default in defaults.items()}
    problems = check_determinism(values)
    if problems:
        raise EnvironmentConflictError("\n".join(problems))
    return values


def check_determinism(
    environ: Mapping[str, str] | None = None, *, at_start: Mapping[str, str] | None = None
) -> list[str]:
    """Return one sentence for each variable that breaks the promise of determinism; empty when all is well.

    environ: None looks at this process, and also at what it was started with: a variable that was set only later
    came too late for whatever reads it once. Given a mapping, only `at_start` (if given) is compared.
    """
    if environ is None:
        import psutil  # type: ignore[import-untyped]

        environ, at_start = os.environ, psutil.Process().environ()
    problems = []
    for name, (_, keeps, allowed) in _PROMISES.items():
        value = environ.get(name)
        if value is None:
            problems.append(f"{name} is not set; determinism needs {allowed}")
        elif not keeps(value):
            problems.append(f"{name}={value!r} contradicts the determinism asked for, which needs {allowed}")
        elif at_start is not None and at_start.get(name) != value:
            before = f"{at_start[name]!r}" if name in at_start else "not set"
            problems.append(f"{name}={value!r} came too late: it was {before} when the process started")
    return problems


def build_environment(
    *,
    inherited: Mapping[str, str] | None = None,
    launcher: Layer | None = None,
    backend: Layer | None = None,
    recipe: Layer | None = None,
    user: Layer | None = None,
    deterministic: bool = False,
    seed: int = 0,
    rank: Mapping[str, str] | None = None,
    devices: Mapping[str, str] | None = None,
    ranks_on_host: int = 1,
) -> dict[str, str]:
    """Return the whole environment of one process, all values text.

    inherited: None inherits this process's environment, `{}` inherits nothing; the layers apply either way. launcher,
    backend, recipe: layers in rising order. user: the user's explicit mapping, applied last. deterministic, seed: add
    the variables of `determinism_variables`. rank: what `rank_variables` gave for a training worker; None for an
    inference server, which then has no rank at all. devices: the variables that narrow the visible cards.

    ConfigError for a name or value that no environment can hold; EnvironmentConflictError with one line for every
    explicit value that contradicts determinism, rank or devices.
    """
    explicit = _texts(user, "your env")
    whole = os.environ if inherited is None else _texts(inherited, "the inherited environment")
    base = {name: value for name, value in whole.items() if not is_rank_variable(name)}
    if deterministic:
        # A test runner or shell may have drawn it at random; two runs shall agree all the same.
        base.pop(_HASH_SEED, None)
    env = {**default_variables(ranks_on_host=ranks_on_host), **base}
    for name, layer in (("launcher", launcher), ("backend", backend), ("recipe", recipe)):
        env.update(_texts(layer, f"the {name}'s environment"))
    problems = _contradictions(explicit, rank or {}, devices or {})
    if deterministic:
        try:
            env.update(determinism_variables(seed, {**env, **explicit}))
        except EnvironmentConflictError as exc:
            problems.append(str(exc))
    if problems:
        raise EnvironmentConflictError("\n".join(problems))
    return {**env, **(rank or {}), **(devices or {}), **explicit}


def _contradictions(explicit: Mapping[str, str], rank: Mapping[str, str], devices: Mapping[str, str]) -> list[str]:
    """List the user's values that differ from this process's rank and cards, or give a rank to one that has none."""
    own_rank = "this worker's rank; leave it out of your env"
    own_cards = "the cards that the layout gives this process; export it before the run starts to choose cards"
    no_rank = "no such rank variable" if rank else "no rank"
    problems = []
    for name, value in explicit.items():
        fact, origin = (rank[name], own_rank) if name in rank else (devices.get(name, value), own_cards)
        if value != fact:
            problems.append(f"{name}={value!r} in your env contradicts {name}={fact!r}, {origin}")
        if is_rank_variable(name) and name not in rank and (rank or name not in _RENDEZVOUS):
            told = f"{name}={value!r} in your env contradicts that this process has {no_rank}"
            problems.append(f"{told}; leave it out of your env")
    return problems


def variable_fault(name: Any, value: Any, *, text_only: bool = False) -> str:
    """Return what keeps a variable out of an environment, or ""; text_only: as the user writes it.

    Then a number, whose text may not be the one that was written, is none, and powertrain's own variables are refused.
    """
    if not isinstance(name, str) or not name or "=" in name or "\0" in name:
        return f"{shown(name)} cannot be a variable's name"
    kinds = str if text_only else (str, int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or "\0" in str(value):
        return f"{name} is {shown(value)}; write the exact text in quotes, without zero bytes"
    return f"{name} is powertrain's own; leave it out" if text_only and name in _OWN else ""


def _texts(layer: Layer | None, where: str) -> dict[str, str]:
    """Return the layer with text values; ConfigError for what has no single obvious text or cannot be passed on."""
    for name, value in (layer or {}).items():
        if fault := variable_fault(name, value):
            message = f"{where}: {fault}"
            raise ConfigError(message)
    return {name: str(value) for name, value in (layer or {}).items()}
