"""One optimizer step: micro-batches with one global denominator, one report of all ranks, and only then the weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from powertrain.errors import ConfigError, NumericsError
from powertrain.tensors.loss import LossInputs, MetricSums, check_output, load_loss
from powertrain.tensors.packing import MicroBatch, plan, render, scored_tokens

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain.interfaces.data import FloatArray, LossSpec, TrainBatch
    from powertrain_fsdp.group import Group
    from powertrain_fsdp.model import Built


@dataclass(slots=True)
class Report:
    """What one rank saw of a step. loss: its share of the global loss. square: sum of squares of its gradients."""

    loss: float = 0.0
    square: float = 0.0
    error: str | None = None
    metrics: MetricSums = field(default_factory=MetricSums)


class Work:
    """This rank's share of a batch as micro-batches; every rank makes `rounds` passes, empty ones included."""

    def __init__(self, batch: TrainBatch, built: Built, spec: EngineSpec, *, weighted: bool) -> None:
        refused = sorted(set(batch.model_inputs) - set(spec.options["model_inputs"]))
        if refused:
            message = f"model inputs {', '.join(refused)} are not allowed; name them in the option model_inputs"
            raise ConfigError(message)
        self.batch, self._built, self._attention = batch, built, spec.options["attention"]
        self.scored = scored_tokens(batch, weighted=weighted)
        model: Any = built.scorer.model
        shares = plan(
            batch,
            self.scored,
            mode=built.mode,
            world=spec.place.world,
            budget=spec.options["microbatch_tokens"],
            hidden_size=model.config.get_text_config().hidden_size,
            masked=self._attention in ("sdpa", "eager"),
        )
        self._mine = shares[spec.place.rank]
        # At least one: a batch without a scored token has gradients of 0, and not none at all.
        self.rounds = max(1, *(len(share) for share in shares))

    def micro_batch(self, index: int) -> MicroBatch | None:
        """Return the micro-batch of one round, or None when this rank has run out of them."""
        if index >= len(self._mine):
            return None
        return render(
            self.batch,
            self._mine[index],
            self.scored,
            attention=self._attention,
            dtype=self._built.compute,
            device=self._built.device,
        )

    def idle(self) -> MicroBatch:
        """Return the smallest forward there is: a rank without work still takes part in every gather and reduction."""
        one = torch.zeros(1, dtype=torch.int64, device=self._built.device)
        inputs = {"input_ids": one[None], "position_ids": one[None]}
        return MicroBatch(inputs, one, one, one, one)

    def fields(self, micro: MicroBatch) -> dict[str, Tensor]:
        """Return token fields, and sample fields spread over their tokens, for one micro-batch."""
        place = micro.place.cpu().numpy()
        found = {name: np.asarray(value)[place] for name, value in self.batch.token_fields.items()}
        sequence = np.searchsorted(self.batch.starts, place, side="right") - 1
        found.update((name, np.asarray(value)[sequence]) for name, value in self.batch.sample_fields.items())
        return {name: self._tensor(value) for name, value in found.items()}

    def weights(self, micro: MicroBatch) -> Tensor:
        """Return the weights of one micro-batch's scored tokens."""
        return self._tensor(self.batch.weights[micro.place.cpu().numpy()])

    def _tensor(self, value: Any) -> Tensor:
        plain = np.ascontiguousarray(value)
        kind = plain.astype(np.float32) if plain.dtype.kind == "f" else plain
        return torch.from_numpy(kind).to(self._built.device)


def accumulate(work: Work, built: Built, spec: EngineSpec, loss: LossSpec) -> Report:
    """Run all micro-batches forward and backward; gradients end summed over ranks, in each parameter's `grad`.

    A loss function that raises does not stop the round, since other ranks wait in it; the report carries the error.
    """
    function = load_loss(loss.name)
    denominator = work.batch.total_weight()
    if not denominator > 0:
        message = f"the weights of the batch add up to {denominator:g}; a step needs a denominator above 0"
        raise ConfigError(message)
    report = Report()
    built.for_training()
    for index in range(work.rounds):
        if built.sharded:
            last = index == work.rounds - 1
            built.scorer.set_requires_gradient_sync(last or spec.options["sync_each_microbatch"])
        micro = work.micro_batch(index)
        passed = micro or work.idle()
        logprobs, entropy = built.scorer(
            passed.inputs,
            passed.source,
            passed.rows,
            passed.targets,
            loss.temperature,
            loss.entropy and micro is not None,
        )
        total = None
        if micro is not None and report.error is None:
            total = _loss_of(work, micro, logprobs, entropy, (function, loss), denominator, report)
        (logprobs.sum() * 0.0 if total is None else total).backward()
        del logprobs, entropy, total
    report.square = _square([p.grad for p in built.trainable.values() if p.grad is not None])
    return report


def _loss_of(
    work: Work,
    micro: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor | None,
    loss: tuple[Any, LossSpec],
    denominator: float,
    report: Report,
) -> Tensor | None:
    """Return this micro-batch's share of the loss, or None with the error in the report."""
    function, spec = loss
    weights = work.weights(micro)
    try:
        inputs = LossInputs(logprobs, entropy, work.fields(micro), weights)
        output = check_output(function(inputs, spec.config), len(micro.place), spec.name)
        weighted = output.terms * weights
        report.metrics.add(output.metrics, len(micro.place))
        report.loss += float(weighted.detach().sum(dtype=torch.float64)) / denominator
        return weighted.sum() / denominator
    except Exception as exc:  # noqa: BLE001 - anything a user's function raises must reach all ranks as one error
        report.error = f"{type(exc).__name__}: {exc}"
        return None


def _square(grads: Sequence[Tensor]) -> float:
    """Sum of squares of this rank's shards (float32 norms of tensors, added in float64)."""
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    local = [g for g in local if g.numel()]
    if not local:
        return 0.0
    norms = torch.stack(torch._foreach_norm(local, 2, dtype=torch.float32))
    return float(norms.double().square().sum())


def settle(report: Report, group: Group, loss: LossSpec, step: int) -> Report:
    """Merge all ranks' reports, in rank order, and raise on all ranks alike what stops the step."""
    reports: list[Report] = group.gather(report)
    for rank, one in enumerate(reports):
        if one.error is not None:
            message = f"loss {loss.name!r} failed on rank {rank}: {one.error}"
            raise ConfigError(message)
    merged = Report()
    for one in reports:
        merged.loss += one.loss
        merged.square += one.square
        merged.metrics.merge(one.metrics)
    norm = merged.square**0.5
    if not (np.isfinite(merged.loss) and np.isfinite(norm)):
        message = (
            f"step {step}: the loss is {merged.loss} and the gradient norm {norm}; both must be finite. "
            "The step was not taken and the weights are as they were; a lower optim.lr, or a look at what the loss is "
            "given, is the way out"
        )
        raise NumericsError(message)
    return merged


def clip(parameters: Sequence[Tensor], norm: float, limit: float | None) -> None:
    """Scale all gradients so that their global norm is at most `limit`; None or 0: leave them."""
    if not limit or norm <= limit:
        return
    grads = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in grads], limit / norm)


def score(work: Work, built: Built, group: Group, temperature: float) -> FloatArray:
    """Return float32 [N] log-probs of the scored tokens on every rank; each comes from exactly one rank."""
    out = torch.zeros(len(work.batch.tokens), dtype=torch.float32)
    built.scorer.eval()
    with torch.no_grad():
        for index in range(work.rounds):
            micro = work.micro_batch(index)
            passed = micro or work.idle()
            logprobs, _ = built.scorer(passed.inputs, passed.source, passed.rows, passed.targets, temperature, False)
            if micro is not None:
                out[micro.place.cpu()] = logprobs.cpu()
    built.reshard()
    result: FloatArray = group.sum(out).numpy()
    return result


class Clock:
    """Wall time by phase, the device waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.seconds = device, dict[str, float]()
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Book the time since the last lap."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now
