"""The model of one rank: made in the fixed order, patched, and sharded layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from powertrain.errors import ConfigError
from powertrain.tensors import determinism
from powertrain.tensors.head import LMHead
from powertrain.tensors.hf_names import Places, places
from powertrain.tensors.models import load_causal_lm, materialize
from powertrain.tensors.packing import choose_mode

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain_fsdp.group import Group


class Scorer(nn.Module):
    """Body and head in one forward, so that the root's hooks have gathered the head's weight when it is used."""

    def __init__(self, model: nn.Module, head: LMHead) -> None:
        super().__init__()
        self.model = model
        self._head = head

    def forward(
        self,
        inputs: Mapping[str, Tensor],
        source: Tensor,
        rows: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs [K] and entropies [K] or None; see `powertrain.tensors.packing.MicroBatch` for the rest."""
        body: Any = self.model.base_model
        hidden = body(**inputs, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, source)
        return self._head.score(hidden, targets, temperature=temperature, entropy=entropy, rows=rows)


@dataclass(slots=True)
class Built:
    """One rank's model, ready to use.

    parameters: name in the model -> Parameter, tied ones once. tied: alias -> name. places: where the HF tensors lie in
    parameters and buffers, nothing with an adapter.
    sharded: modules that FSDP manages, root first; empty when nothing is sharded. compute: dtype of the forward pass.
    training: modules that know of training passes; see `for_training`.
    """

    scorer: Scorer
    parameters: dict[str, nn.Parameter]
    tied: dict[str, str]
    mode: str
    folder: str
    compute: torch.dtype
    device: torch.device
    sharded: list[Any] = field(default_factory=list)
    lora: bool = False
    places: Places = field(default_factory=dict)
    training: list[nn.Module] = field(default_factory=list)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers by their names (a router's bias, for one): part of the weights, moved by no optimizer."""
        state = self.scorer.model.state_dict(keep_vars=True)
        return {name: tensor for name, tensor in state.items() if not isinstance(tensor, nn.Parameter)}

    def for_training(self) -> None:
        """Go into the mode of a training pass: the model computes what it does when it scores.

        Dropout and router noise of its own would make gradients depend on how samples are dealt, and log-probs differ
        from inference's. Only the adapter's dropout and the layers that recompute their activations are switched.
        """
        self.scorer.eval()
        for module in self.training:
            module.training = True

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer moves."""
        return {name: p for name, p in self.parameters.items() if p.requires_grad}

    def reshard(self) -> None:
        """Give gathered weights back, so that modules hold their shards; needed after a forward without a backward."""
        for module in self.sharded:
            module.reshard()


def device_of(spec: EngineSpec) -> torch.device:
    """Return this rank's device and make it the current one."""
    if spec.place.device == "cpu":
        return torch.device("cpu")
    device = torch.device(spec.place.device, 0 if torch.cuda.device_count() == 1 else spec.place.local_rank)
    torch.cuda.set_device(device)
    return device


def build(spec: EngineSpec, group: Group, record: list[dict[str, Any]]) -> Built:
    """Make the model: determinism, head and attention are settled before it is constructed; then load, patch, wrap.

    Every rank loads the whole model on the host first. record: gets one entry for each stage, in order.
    """
    options, place = spec.options, spec.place
    if spec.deterministic:
        determinism.enable(place.device)
        determinism.check(place.device)
    determinism.seed_all(spec.seed)
    record.append({"stage": "determinism", "asked": spec.deterministic, **determinism.observed()})
    record.append({"stage": "head", "fp32": spec.head.fp32, "chunk": spec.head.chunk})
    record.append({"stage": "attention", "attention": options["attention"]})
    device = device_of(spec)
    group.join(always=options["shard"] == "always" or _wants_master(spec))

    record.append({"stage": "construct", **determinism.observed()})
    folder = materialize(spec.model)
    held = "float32" if _wants_master(spec) else spec.dtype
    model = load_causal_lm(folder, dtype=held, attention=options["attention"])
    record.append({"stage": "load", "folder": folder, "dtype": held})

    _patch(model, spec)
    record.append({"stage": "patch", "lora": spec.lora is not None})
    compute = getattr(torch, spec.dtype)
    mode = choose_mode(model, options["packing"], options["attention"])
    scorer = Scorer(model, LMHead.of(model, fp32=spec.head.fp32, chunk=spec.head.chunk)).to(device)
    sharded = _wrap(scorer, spec, group) if group.mesh is not None else []
    record.append({"stage": "wrap", "sharded": len(sharded), "packing": mode})
    determinism.seed_all(spec.seed, place.rank)
    parameters, tied = _names(model)
    built = Built(scorer, parameters, tied, mode, folder, compute, device, sharded, spec.lora is not None)
    built.training = _training_modules(model)
    if not built.lora:
        named = parameters | built.buffers
        named |= {alias: parameters[name] for alias, name in tied.items()}
        built.places = places(model, {name: tuple(tensor.shape) for name, tensor in named.items()})
    return built


def _wants_master(spec: EngineSpec) -> bool:
    return spec.options["master_dtype"] == "float32" and spec.dtype != "float32"


def _patch(model: Any, spec: EngineSpec) -> None:
    """Add the adapter, freeze what is not trained, switch activation checkpointing on."""
    if spec.lora is not None:
        from powertrain_fsdp.lora import inject

        inject(model, spec.lora, spec.model)
    if spec.optim is None:
        model.requires_grad_(False)
    if spec.options["activation_checkpointing"]:
        settings = {"use_reentrant": False}
        if hasattr(model, "activation_checkpointing_enable"):  # the later name; the other one goes in v6
            model.activation_checkpointing_enable(activation_checkpointing_kwargs=settings)
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)


def _training_modules(model: nn.Module) -> list[nn.Module]:
    """Return adapters' dropouts and the layers that recompute, whose own dropout rates become 0."""
    found = []
    for name, module in model.named_modules():
        recomputes = bool(getattr(module, "gradient_checkpointing", False))
        if recomputes:
            for rate in [key for key, value in vars(module).items() if "drop" in key and isinstance(value, float)]:
                setattr(module, rate, 0.0)
        if recomputes or "lora_dropout" in name:
            found.append(module)
    return found


def _names(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, str]]:
    parameters: dict[str, nn.Parameter] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(parameter), name)
        if owner == name:
            parameters[name] = parameter
        else:
            tied[name] = owner
    return parameters, tied


def _wrap(scorer: Scorer, spec: EngineSpec, group: Group) -> list[Any]:
    """Shard every decoder layer and then the rest; gradients are summed, since the loss has one global denominator."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    names = set(getattr(scorer.model, "_no_split_modules", None) or ())
    layers = [module for module in scorer.model.modules() if type(module).__name__ in names]
    if not layers:
        message = f"{type(scorer.model).__name__} does not name its layers (_no_split_modules); it cannot be sharded"
        raise ConfigError(message)
    reduce = None if spec.dtype == "float32" else torch.float32
    compute = getattr(torch, spec.dtype) if _wants_master(spec) else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    for layer in layers:
        fully_shard(layer, mesh=group.mesh, mp_policy=policy)
    fully_shard(scorer, mesh=group.mesh, mp_policy=policy)
    sharded = [module for module in scorer.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        # Both: a divide factor alone makes FSDP ask for a pre-multiplied sum, which gloo does not have.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return sharded
