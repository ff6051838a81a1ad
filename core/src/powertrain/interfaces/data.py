"""What goes in and out of engines: requests, completions, training batches and step results.

All arrays are numpy arrays on the host. Sequences are ragged: token arrays of all sequences lie end to end and
`starts` says where each begins, so there is no padding row or column that could leak into a mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from itertools import chain
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.interfaces.wire import record

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    IntArray = NDArray[np.int64]
    FloatArray = NDArray[np.float32]


@record()
class SamplingParams:
    """How tokens are drawn.

    temperature 0 is greedy. top_k 0 and top_p 1.0 are off. stop_token_ids end a completion and are kept as its last
    token. seed: together with the request id and the sample's index it fixes every draw, whatever else is in the batch.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    n: int = 1

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.n < 1:
            message = f"max_tokens is {self.max_tokens} and n is {self.n}; both must be at least 1"
            raise ConfigError(message)
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            message = (
                f"temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k}: temperature and top_k are "
                "0 or more, top_p lies above 0 and up to 1"
            )
            raise ConfigError(message)


@record()
class GenerateRequest:
    """One prompt, `sampling.n` completions of it.

    request_id: unique among requests in flight; names it in abort and in logs. prompt: token ids, int64 [P], P >= 1; a
    list becomes an array. adapter: versioned adapter name, or None for what the engine serves by default.
    """

    request_id: str
    prompt: IntArray
    sampling: SamplingParams = field(default_factory=SamplingParams)
    adapter: str | None = None

    def __post_init__(self) -> None:
        import numpy as np

        prompt = np.asarray(self.prompt)
        if prompt.ndim != 1 or prompt.size < 1 or prompt.dtype.kind not in "iu":
            got = f"{self.prompt!r}"[:80]
            message = f"request {self.request_id!r}: a prompt is one row of at least 1 token id, got {got}"
            raise ConfigError(message)
        object.__setattr__(self, "prompt", prompt.astype(np.int64, copy=False))


@record(kw_only=False)
class Segment:
    """Tokens [start, end) of a completion that one weight version produced; `version` is `str(WeightVersion)`."""

    start: int
    end: int
    version: str


@record()
class Completion:
    """One sampled continuation.

    tokens: int64 [T]. logprobs: float32 [T], log-probability of each token under the distribution it was drawn from
    (temperature, top_k, top_p applied). logprobs_t1: float32 [T], under temperature 1 with nothing cut off.
    finish: "stop", "length" or "abort". segments: cover [0, T) in order.
    """

    tokens: IntArray
    logprobs: FloatArray
    logprobs_t1: FloatArray
    finish: str
    segments: tuple[Segment, ...]


@record()
class GenerateResult:
    """The completions of one request, in sample order."""

    request_id: str
    completions: tuple[Completion, ...]


@record()
class LossSpec:
    """A loss by name, "module:function", and its plain config; `powertrain.tensors.loss` has the function's contract.

    temperature: the sampling temperature under which log-probs are computed. entropy: also compute the entropy.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    entropy: bool = False


@record()
class TrainBatch:
    """A global batch: every rank is handed the same one and takes its own sequences from it.

    tokens: int64 [N], all sequences (prompt and completion) end to end. starts: int64 [B + 1], starts[0] = 0,
    starts[B] = N. prompt_lens: int64 [B], tokens of each sequence that are not scored (at least 1).
    weights: float32 [N], weight of each token's loss term, 0 on prompts; the loss of a step is
    sum(weights * term) / denominator. denominator: default sum(weights) over the whole batch, so that gradients do
    not depend on how sequences are dealt to ranks and micro-batches.
    token_fields: name -> float array [N] (advantages, old_logprobs, ref_logprobs, values), handed to the loss.
    sample_fields: name -> array [B], spread over the tokens of each sequence for the loss.
    model_inputs: name -> array, optional model inputs an engine must allow by name (multimodal, routing replay).
    groups: int64 [B] or None, equal numbers mark sequences with the same prompt (an engine may share its compute).
    meta: structural facts (turn, prompt ids, ...); they never reach a model.
    """

    tokens: IntArray
    starts: IntArray
    prompt_lens: IntArray
    weights: FloatArray
    denominator: float | None = None
    token_fields: Mapping[str, Any] = field(default_factory=dict)
    sample_fields: Mapping[str, Any] = field(default_factory=dict)
    model_inputs: Mapping[str, Any] = field(default_factory=dict)
    groups: IntArray | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = list(_faults(self))
        if problems:
            message = "training batch: " + "; ".join(problems)
            raise ConfigError(message)

    @property
    def size(self) -> int:
        """Number of sequences."""
        return len(self.starts) - 1

    def total_weight(self) -> float:
        """The global denominator: the given one, or the sum of all weights (float64)."""
        import numpy as np

        return float(self.denominator) if self.denominator is not None else float(self.weights.sum(dtype=np.float64))

    @classmethod
    def from_sequences(
        cls,
        prompts: Sequence[Sequence[int]],
        completions: Sequence[Sequence[int]],
        *,
        token_fields: Mapping[str, Sequence[Sequence[float]]] | None = None,
        sample_fields: Mapping[str, Sequence[float]] | None = None,
        groups: Sequence[int] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> TrainBatch:
        """Build a batch from lists; every completion token weighs 1.

        token_fields hold one value for each completion token of each sequence. ConfigError when counts differ.
        """
        import numpy as np

        if len(prompts) != len(completions):
            message = f"{len(prompts)} prompts and {len(completions)} completions; there must be as many of both"
            raise ConfigError(message)
        whole = [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)]
        starts = np.cumsum([0, *map(len, whole)], dtype=np.int64)
        tokens = np.asarray(list(chain.from_iterable(whole)), dtype=np.int64)
        fields = {"weights": [[1.0] * len(c) for c in completions], **(token_fields or {})}
        spread = {}
        for name, rows in fields.items():
            flat = np.zeros(len(tokens), dtype=np.float32)
            for i, (row, prompt, completion) in enumerate(zip(rows, prompts, completions, strict=True)):
                if len(row) != len(completion):
                    message = f"{name!r} of sequence {i} has {len(row)} values for {len(completion)} completion tokens"
                    raise ConfigError(message)
                flat[starts[i] + len(prompt) : starts[i + 1]] = row
            spread[name] = flat
        return cls(
            tokens=tokens,
            starts=starts,
            prompt_lens=np.asarray([len(p) for p in prompts], dtype=np.int64),
            weights=spread.pop("weights"),
            token_fields=spread,
            sample_fields={k: np.asarray(v) for k, v in (sample_fields or {}).items()},
            groups=None if groups is None else np.asarray(groups, dtype=np.int64),
            meta=dict(meta or {}),
        )


def _faults(batch: TrainBatch) -> list[str]:
    """Return what is wrong with a batch's shapes, each with both numbers."""
    import numpy as np

    n, size = len(batch.tokens), len(batch.starts) - 1
    problems: list[str] = []
    if size < 1 or batch.starts[0] != 0 or batch.starts[-1] != n or (np.diff(batch.starts) < 1).any():
        problems.append(f"starts must rise from 0 to the number of tokens ({n}), and no sequence may be empty")
    if len(batch.prompt_lens) == size >= 1 and (batch.prompt_lens < 1).any():
        problems.append("a prompt length is 0; the first token of a sequence cannot be scored")
    of_tokens = {f"values of token field {name!r}": value for name, value in batch.token_fields.items()}
    of_sequences = {f"values of sample field {name!r}": value for name, value in batch.sample_fields.items()}
    of_sequences |= {} if batch.groups is None else {"group numbers": batch.groups}
    for number, what, table in (
        (n, "tokens", {"weights": batch.weights, **of_tokens}),
        (size, "sequences", {"prompt lengths": batch.prompt_lens, **of_sequences}),
    ):
        problems += [f"{len(v)} {name} for {number} {what}" for name, v in table.items() if len(v) != number]
    return problems or _prompt_faults(batch)


def _prompt_faults(batch: TrainBatch) -> list[str]:
    """Return what is wrong with the prompts of a batch whose shapes fit: silently, nothing would be learned of it."""
    import numpy as np

    lengths = np.diff(batch.starts)
    if len(long := np.flatnonzero(batch.prompt_lens > lengths)):
        i = int(long[0])
        return [f"sequence {i} has {lengths[i]} tokens and a prompt of {batch.prompt_lens[i]}"]
    offsets = np.arange(len(batch.tokens)) - np.repeat(batch.starts[:-1], lengths)
    count = np.count_nonzero(batch.weights[offsets < np.repeat(batch.prompt_lens, lengths)])
    return [f"{count} prompt tokens have a weight, which the denominator would count; give them 0"] if count else []


@record()
class StepResult:
    """What a training step did, equal on every rank.

    loss: the step's loss. grad_norm: global L2 norm before clipping. lr: learning rate used. tokens: scored tokens
    of the global batch. step: number of optimizer steps taken so far, this one included. metrics: what the loss
    reported, averaged over scored tokens (names ending in `_max` are maxima). seconds: wall time by phase.
    """

    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
