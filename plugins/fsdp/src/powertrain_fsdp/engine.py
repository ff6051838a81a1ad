"""The training engine: FSDP2 over the data axis, one optimizer, one schedule."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from powertrain.errors import ConfigError, PowertrainError
from powertrain.interfaces.data import StepResult
from powertrain.interfaces.train import TrainEngine
from powertrain.tensors.schedules import check_schedule, learning_rate
from powertrain_fsdp import checkpoint, needs
from powertrain_fsdp.export import export
from powertrain_fsdp.group import Group
from powertrain_fsdp.model import Built, build
from powertrain_fsdp.source import FsdpWeightSource
from powertrain_fsdp.step import Clock, Work, accumulate, clip, score, settle

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec, OptimSpec
    from powertrain.interfaces.data import FloatArray, LossSpec, TrainBatch
    from powertrain.interfaces.weights import WeightSource


class FsdpEngine(TrainEngine):
    """One rank of an FSDP2 engine; see `TrainEngine` for the contract.

    AdamW moves all trainable parameters, and its weight decay acts on all of them. A training pass has no dropout but
    the adapter's, whose draws do depend on how sequences are dealt. Without `spec.optim` the engine only
    scores. `build_record` lists the stages of the build in the order in which they were done, with what was set.
    """

    def __init__(self) -> None:
        self.build_record: list[dict[str, Any]] = []
        self._spec: EngineSpec | None = None
        self._group: Group | None = None
        self._built: Built | None = None
        self._optimizer: torch.optim.AdamW | None = None
        self._step = 0
        self._changes = 0
        self._moves = 0

    def prepare(self, env: Mapping[str, str]) -> None:
        """Set what is missing of `env`, and say what came too late."""
        needs.apply(env)

    def build(self, spec: EngineSpec) -> None:
        """Build this rank; ConfigError for options, a model or a LoRA target that cannot be used."""
        from powertrain.options import resolve
        from powertrain_fsdp.hooks import OPTIONS

        if set(spec.options) != {option.name for option in OPTIONS}:
            import dataclasses

            spec = dataclasses.replace(spec, options=resolve(OPTIONS, spec.options, where="backend fsdp"))
        if spec.optim is not None:
            check_schedule(spec.optim.schedule)
        self._spec = spec
        self._group = Group(spec.place, spec.timeout)
        self._built = build(spec, self._group, self.build_record)
        if spec.optim is not None:
            self._optimizer = _adamw(self._built, spec.optim)

    def train_step(self, batch: TrainBatch, loss: LossSpec) -> StepResult:
        """Take one step; see `TrainEngine.train_step`. NumericsError and ConfigError leave the weights as they were."""
        changes = self._changes
        try:
            return self._train_step(batch, loss)
        except PowertrainError:
            raise  # all ranks raise these alike
        except BaseException:
            # Other ranks may wait in a collective that this one never reaches, and weights may be moved in part.
            if self._parts[1].world > 1 or self._changes != changes:
                self.state = "failed"
            raise
        finally:
            if self._optimizer is not None:
                self._optimizer.zero_grad(set_to_none=True)

    def _train_step(self, batch: TrainBatch, loss: LossSpec) -> StepResult:
        spec, group, built = self._parts
        optimizer = self._optimizer
        if optimizer is None or spec.optim is None:
            message = f"the engine {spec.part or spec.backend!r} was built without an optimizer (optim); it only scores"
            raise ConfigError(message)
        clock = Clock(built.device)
        work = Work(batch, built, spec, weighted=True)
        clock.lap("plan")
        report = accumulate(work, built, spec, loss)
        clock.lap("forward_backward")
        merged = settle(report, group, loss, self._step + 1)
        norm = merged.square**0.5
        clip(list(built.trainable.values()), norm, spec.optim.clip)
        lr = learning_rate(self._step, spec.optim.lr, spec.optim.schedule)
        for entry in optimizer.param_groups:
            entry["lr"] = lr
        self._changes += 1  # before the first write, so that a step that breaks off counts too
        optimizer.step()
        self._step += 1
        clock.lap("optimizer")
        return StepResult(
            loss=merged.loss,
            grad_norm=norm,
            lr=lr,
            tokens=merged.metrics.count,
            step=self._step,
            metrics=merged.metrics.results(),
            seconds=clock.seconds,
        )

    def logprobs(self, batch: TrainBatch, temperature: float = 1.0) -> FloatArray:
        """Score every token behind its prompt, whatever its weight."""
        spec, group, built = self._parts
        return score(Work(batch, built, spec, weighted=False), built, group, temperature)

    def weights(self) -> WeightSource:
        """Return the shards' source; with LoRA, the adapter's alone."""
        spec, _, built = self._parts
        return FsdpWeightSource(built, spec, lambda: self._changes, lambda: self._moves)

    def save(self, folder: str) -> None:
        """Write DCP shards, random states and a checked list of files."""
        spec, group, built = self._parts
        checkpoint.save(Path(folder), built, self._optimizer, spec, group, self._step)

    def load(self, folder: str) -> None:
        """Take a saved state; CheckpointError, before anything is changed, when it is damaged."""
        spec, group, built = self._parts
        self._changes += 1  # before the first write, so that a load that breaks off counts too
        self._step = checkpoint.load(Path(folder), built, self._optimizer, spec, group)

    def export(self, folder: str) -> None:
        """Write an HF model with its tokenizer, or a PEFT adapter."""
        spec, group, built = self._parts
        export(Path(folder), built, spec, group)

    def offload(self) -> None:
        """Move weights and Adam moments to the host; nothing to do on CPU."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        """Move them back."""
        self._move(self._parts[2].device)

    def _move(self, device: torch.device) -> None:
        built = self._parts[2]
        if built.device.type == "cpu":
            return
        self._moves += 1
        built.reshard()
        built.scorer.to(device)
        for state in self._optimizer.state.values() if self._optimizer is not None else ():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(device)
        torch.cuda.synchronize(built.device)
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Free the model and leave the process group."""
        self._optimizer = self._built = None
        gc.collect()
        if self._group is not None:
            self._group.leave()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def health(self) -> Mapping[str, Any]:
        """Return state, steps taken, and the build's record."""
        return {"state": self.state, "step": self._step, "changes": self._changes, "build": list(self.build_record)}

    @property
    def _parts(self) -> tuple[EngineSpec, Group, Built]:
        assert self._spec is not None
        assert self._group is not None
        assert self._built is not None
        return self._spec, self._group, self._built


def _adamw(built: Built, optim: OptimSpec) -> torch.optim.AdamW:
    """Return AdamW over all trainable parameters, in its fused form (one pass over memory, CPU and CUDA)."""
    return torch.optim.AdamW(
        list(built.trainable.values()),
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        fused=True,
    )
