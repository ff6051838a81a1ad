"""The engine's native checkpoint: DCP shards, a checked list of files, and each rank's random states.

`state.json` names everything that must be there with size and CRC-32, and has a CRC-32 itself, so that a damaged or
incomplete folder is refused before a single weight is touched. With LoRA only the adapter is stored; the base model is
read from its folder again.
"""

from __future__ import annotations

import io
import json
import random
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from powertrain.errors import CheckpointError
from powertrain.tensors import determinism

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain_fsdp.group import Group
    from powertrain_fsdp.model import Built

STATE: Final = "state.json"
_FORMAT: Final = 2
_MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")


def save(
    folder: Path, built: Built, optimizer: torch.optim.Optimizer | None, spec: EngineSpec, group: Group, step: int
) -> None:
    """Write all ranks' state into an empty folder. Collective, complete on return; CheckpointError on all ranks."""
    error: Exception | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if group.rank == 0 and any(folder.iterdir()):
            error = FileExistsError(f"{folder} is not empty")
    except OSError as exc:
        error = exc
    group.agree(error, CheckpointError)
    with_optim = optimizer is not None and not spec.no_save_optim
    tensors = _tensors(built, optimizer if with_optim else None)
    try:
        with _single_process_is_meant():
            dcp.save(tensors, checkpoint_id=folder / "shards", no_dist=group.world == 1)
        content = io.BytesIO()  # torch's own writer hides what the system says of a full disk
        torch.save(_random_states(), content)
        (folder / f"random-{group.rank}.pt").write_bytes(content.getvalue())
    except dcp.api.CheckpointException as exc:  # it holds the ranks' own errors, and their traces in its text
        error = next((fault for fault, _ in exc.failures.values() if isinstance(fault, Exception)), exc)
    except (OSError, RuntimeError) as exc:
        error = exc
    group.agree(error, CheckpointError)
    if group.rank == 0:
        try:
            state = {
                "format": _FORMAT,
                "step": step,
                "world": group.world,
                "optim": with_optim,
                "adapter": built.lora,
                "dtype": spec.dtype,
                "shapes": _shapes(built),
                "files": {str(p.relative_to(folder)): _mark(p) for p in sorted(folder.rglob("*")) if p.is_file()},
            }
            (folder / STATE).write_text(json.dumps({**state, "crc": _crc(state)}, indent=1))
        except OSError as exc:
            error = exc
    group.agree(error, CheckpointError)


def load(folder: Path, built: Built, optimizer: torch.optim.Optimizer | None, spec: EngineSpec, group: Group) -> int:
    """Take the state of `save` into the built model and return the number of steps taken. Collective.

    Another number of ranks may have saved it; random states then begin anew from the seed and the step. CheckpointError
    on all ranks for a folder that is incomplete, damaged, or of another kind of run, before anything is changed.
    """
    error: Exception | None = None
    state: dict[str, Any] = {}
    try:
        state = _checked(folder, built, spec, verify=group.rank == 0)
    except (CheckpointError, OSError) as exc:
        error = exc
    group.agree(error, CheckpointError)
    with_optim = optimizer is not None and state["optim"] and not spec.no_load_optim
    if optimizer is not None:
        optimizer.state.clear()
    try:
        tensors = _tensors(built, optimizer if with_optim else None, fresh=True)
        with _single_process_is_meant():
            dcp.load(tensors, checkpoint_id=folder / "shards", no_dist=group.world == 1)
        if state["world"] == group.world:
            _set_random_states(torch.load(folder / f"random-{group.rank}.pt", weights_only=True))
        else:
            determinism.seed_all(spec.seed + 1_000_003 * int(state["step"]), group.rank)
    except Exception as exc:  # noqa: BLE001 - DCP and its readers raise anything; the cause is chained
        error = exc
    group.agree(error, CheckpointError)
    return int(state["step"])


def _checked(folder: Path, built: Built, spec: EngineSpec, *, verify: bool) -> dict[str, Any]:
    path = folder / STATE
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        files, shapes = dict(state["files"]), dict(state["shapes"])
        kind = (state["format"], state["adapter"], state["optim"], state["step"], state["world"])
        found, meant = _crc(state), state["crc"] if kind[0] == _FORMAT else None
    except FileNotFoundError as exc:
        message = f"{folder} is no complete checkpoint: {STATE} is missing"
        raise CheckpointError(message) from exc
    except (ValueError, KeyError, TypeError) as exc:
        message = f"{path} is damaged: {exc}"
        raise CheckpointError(message) from exc
    if kind[0] != _FORMAT:
        message = f"{path} has format {kind[0]}; this release reads {_FORMAT}"
        raise CheckpointError(message)
    if found != meant:
        message = f"{path} is damaged: it has CRC-32 {found}, must have {meant}"
        raise CheckpointError(message)
    if bool(kind[1]) != built.lora:
        words = {True: "a LoRA adapter", False: "full weights"}
        message = f"the checkpoint in {folder} holds {words[bool(kind[1])]}, the engine trains {words[built.lora]}"
        raise CheckpointError(message)
    _check_shapes(folder, shapes, _shapes(built))
    if not kind[2] and spec.optim is not None and not (spec.no_load_optim or spec.no_save_optim):
        message = f"the checkpoint in {folder} has no optimizer state; set no_load_optim to begin with fresh moments"
        raise CheckpointError(message)
    for name, mark in files.items() if verify else ():
        part = folder / name
        found = _mark(part) if part.is_file() else None
        if found != mark:
            message = f"the checkpoint in {folder} is damaged: {name} has {found}, must have {mark} (bytes, CRC-32)"
            raise CheckpointError(message)
    return state


def _check_shapes(folder: Path, stored: dict[str, Any], own: dict[str, list[int]]) -> None:
    """Raise CheckpointError naming a tensor that only one side has, or that has another shape."""
    for name in sorted(stored.keys() | own.keys()):
        if stored.get(name) != own.get(name):
            message = (
                f"the checkpoint in {folder} belongs to another model: {name} has shape {stored.get(name)} there "
                f"and {own.get(name)} in the engine"
            )
            raise CheckpointError(message)


def _shapes(built: Built) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in (built.trainable if built.lora else built.parameters).items()}


@contextmanager
def _single_process_is_meant() -> Iterator[None]:
    """DCP warns that it works without a process group; a world of 1 has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _crc(state: dict[str, Any]) -> int:
    """Return the CRC-32 of a state, without the CRC itself in it."""
    return zlib.crc32(json.dumps({k: v for k, v in state.items() if k != "crc"}, sort_keys=True).encode())


def _mark(path: Path) -> list[int]:
    """Return [bytes, CRC-32] of a file."""
    crc = size = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return [size, crc]


def _tensors(built: Built, optimizer: torch.optim.Optimizer | None, *, fresh: bool = False) -> dict[str, Any]:
    """Return name -> tensor of all that is stored, the engine's own. fresh: give the
    optimizer moments to load into; without it, one that has taken no step yet is stored with moments of 0.
    """
    kept = built.trainable if built.lora else built.parameters
    tensors: dict[str, Any] = {f"model.{name}": parameter.detach() for name, parameter in kept.items()}
    if optimizer is None:
        return tensors
    for name, parameter in built.trainable.items():
        moments = optimizer.state.get(parameter) or _empty_moments(parameter, optimizer)
        if fresh:
            optimizer.state[parameter] = moments
        tensors |= {f"optim.{name}.{key}": moments[key] for key in _MOMENTS}
    return tensors


def _empty_moments(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What torch's AdamW makes at its first step: a float32 step count (on the device when fused) and two moments."""
    device = parameter.device if optimizer.defaults["fused"] else "cpu"
    plain = parameter.detach()
    return {
        "step": torch.zeros((), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(plain),
        "exp_avg_sq": torch.zeros_like(plain),
    }


def _random_states() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": [version, list(words), gauss],
        "numpy": [torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(cached)],
    }


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, cached))
