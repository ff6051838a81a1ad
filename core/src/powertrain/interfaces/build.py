"""What an engine is built from: model, precision, determinism, LM head, LoRA, optimizer, its place among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Final

from powertrain.errors import ConfigError
from powertrain.interfaces.wire import record
from powertrain.options import option

_PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@record()
class HeadSpec:
    """Precision of the LM head, one setting for both sides.

    fp32: logits and log-probs from a float32 product whatever the model's dtype. chunk: number of positions whose
    logits exist at once (None: all at once); the two are independent of each other.
    """

    fp32: bool = option(default=True, help="compute logits and log-probs in float32 on both sides")
    chunk: int | None = option(default=None, help="positions whose logits exist at once; all if not given", minimum=1)


@record()
class LoraSpec:
    """A LoRA adapter to train: PEFT's r, alpha, dropout and the suffixes of the target modules."""

    rank: int = option(default=8, help="rank of the adapter", minimum=1)
    alpha: float = option(default=16.0, help="scale of the adapter, times 1/rank")
    dropout: float = option(default=0.0, help="dropout on the adapter's input", minimum=0, maximum=1)
    targets: tuple[str, ...] = option(default=_PROJECTIONS, help="suffixes of the modules that get an adapter")
    name: str = option(default="policy", help="base of the versioned adapter names")


@record()
class ScheduleSpec:
    """Learning-rate schedule shared by every training engine; see `powertrain.tensors.schedules` for its exact meaning.

    kind: constant, linear or cosine. warmup_steps: fixed number of steps, wins over the ratio; 0 means none, None
    means proportional. warmup_ratio: share of total_steps used when warmup_steps is None. min_ratio: floor of the
    decay as a share of the peak.
    """

    kind: str = option(default="constant", help="shape of the decay", choices=("constant", "linear", "cosine"))
    total_steps: int | None = option(default=None, help="when the decay ends; with the recipe if not given", minimum=1)
    warmup_steps: int | None = option(default=None, help="fixed warmup, wins over warmup_ratio; 0: none", minimum=0)
    warmup_ratio: float = option(default=0.0, help="warmup as share of total_steps", minimum=0, maximum=1)
    min_ratio: float = option(default=0.0, help="floor as share of the peak", minimum=0, maximum=1)


@record()
class OptimSpec:
    """AdamW and its learning rate. clip: largest global gradient norm (None: no clipping)."""

    lr: float = option(default=1e-5, help="peak learning rate", minimum=0)
    beta1: float = option(default=0.9, help="decay of Adam's first moment", minimum=0, maximum=1)
    beta2: float = option(default=0.999, help="decay of Adam's second moment", minimum=0, maximum=1)
    eps: float = option(default=1e-8, help="Adam's epsilon", minimum=0)
    weight_decay: float = option(default=0.0, help="decoupled weight decay", minimum=0)
    clip: float | None = option(default=1.0, help="largest global gradient norm; 0 for no clipping", minimum=0)
    schedule: ScheduleSpec = option(default=ScheduleSpec(), help="learning-rate schedule")


@record()
class RankSpec:
    """One rank's place in its engine.

    rank/world: within the engine (an infer instance is an engine of its own). coordinates: axis name -> index.
    local_rank: among this engine's ranks on its host. device: "cpu" or "cuda" (with only this rank's card visible it
    is card 0). rendezvous: "host:port" of the engine's own process group ("" for one rank). instance: index among
    the part's engines.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    instance: int = 0
    coordinates: Mapping[str, int] = field(default_factory=dict)
    device: str = "cpu"
    rendezvous: str = ""


@record()
class EngineSpec:
    """All that one rank of an engine is built from; the same for every rank except `place`.

    part: the part's name in the layout ("actor", or the backend's when it has none). model: a folder in HF format.
    dtype: dtype in which weights are held ("float32", "bfloat16"). axes: axis name -> size. options: the backend's
    options, resolved, defaults filled in. seed: of everything random in the engine. deterministic: bitwise equal
    results are asked for. no_save_optim/no_load_optim: leave optimizer state out of save and load.
    timeout: seconds that any collective or wait inside the engine may take.
    """

    backend: str
    role: str
    model: str
    part: str = ""
    dtype: str = "float32"
    axes: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    deterministic: bool = False
    head: HeadSpec = field(default_factory=HeadSpec)
    lora: LoraSpec | None = None
    optim: OptimSpec | None = None
    place: RankSpec = field(default_factory=RankSpec)
    no_save_optim: bool = False
    no_load_optim: bool = False
    timeout: float = 300.0


def check_head_pair(train: HeadSpec, infer: HeadSpec, *, allow_mismatch: bool = False) -> bool:
    """Check that both sides compute log-probs with one head precision; returns True when they agree.

    A float32 head on one side alone makes the train/infer mismatch worse than none, so it is refused with
    `ConfigError` unless the recipe allows it in so many words (`head_mismatch: allow`), which the metrics then show.
    """
    if train.fp32 == infer.fp32:
        return True
    if allow_mismatch:
        return False
    names = {True: "float32", False: "the model's dtype"}
    message = (
        f"the LM head is {names[train.fp32]} in training and {names[infer.fp32]} in inference; set both alike, "
        "or say `head_mismatch: allow` to measure the difference"
    )
    raise ConfigError(message)
