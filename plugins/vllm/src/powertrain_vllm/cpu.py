"""On a CPU: experts that compute with their weights as they are, and a rotation that is right.

vLLM packs `w13_weight` and `w2_weight` for its grouped product and puts the packed ones in the parameters' place, so
no box of a checkpoint's tensor is in them any more. `PlainExperts` do the same sums with torch's products, expert by
expert. Its kernel for interleaved rotary embeddings (DeepSeek's) rotates all heads but one wrongly (0.32.0, AVX512).
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.nn.functional import linear
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.activation import (
    ApplyMoEActivationConfig,
    MoEActivation,
    apply_moe_activation,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.oracle import unquantized
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

_known: WeakValueDictionary[int, PlainExperts] = WeakValueDictionary()


class PlainExperts(CPUUnquantizedExperts):  # type: ignore[misc]
    """Weights stay [E, 2I, H] (gates above ups) and [E, H, I]."""

    output_alignment = 1  # torch's products take any size

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _known[id(self)] = self

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave the weights."""

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Write the experts' sum for each row of hidden_states [T, H] into output [T, H]; args: as vLLM's.

        topk_ids [T, K]: of all experts; expert_map: from these to the ones held here, -1 for others'.
        """
        names = ("a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta")
        given = {**dict(zip((*names, "apply_router_weight_on_input"), args, strict=False)), **kwargs}
        weigh = not given["apply_router_weight_on_input"]
        tensors = output, hidden_states, w1, w2, topk_weights, topk_ids, expert_map
        _sum_of_experts(*tensors, id(self), activation.value, weigh)


@torch.library.custom_op("powertrain_vllm::sum_of_experts", mutates_args=("output",))
def _sum_of_experts(
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    known: int,
    activation: str,
    weigh: bool,
) -> None:
    """Do what `PlainExperts.apply` says; an operator, since which experts are asked is nothing to compile into a graph.

    known: whose biases and limits hold. weigh: by topk_weights.
    """
    experts, kind = _known[known], MoEActivation(activation)
    own = topk_ids.long() if expert_map is None else expert_map.long()[topk_ids.long()]
    config = ApplyMoEActivationConfig.from_configs(experts.moe_config, experts.quant_config)
    total = torch.zeros_like(output)
    for expert in own.unique().tolist():
        if expert < 0:
            continue
        rows, places = (own == expert).nonzero(as_tuple=True)
        first = linear(hidden_states[rows], w1[expert], _part(experts.w1_bias, expert))
        middle = first.new_empty(len(rows), w2.shape[2])
        apply_moe_activation(kind, middle, first, activation_config=config)
        found = linear(middle, w2[expert], _part(experts.w2_bias, expert))
        if weigh:
            found = found * topk_weights[rows, places, None].to(found.dtype)
        total.index_add_(0, rows, found)
    output.copy_(total)


def _part(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]


def install() -> None:
    """Let vLLM take these; for models that are built from now on."""
    before = unquantized.backend_to_kernel_cls
    if getattr(before, "plain", False):
        return

    def kernels(backend: Any) -> list[Any]:
        return [PlainExperts] if backend is unquantized.UnquantizedMoeBackend.CPU else before(backend)

    kernels.plain = True  # type: ignore[attr-defined]
    unquantized.backend_to_kernel_cls = kernels
    fast = RotaryEmbedding.forward_cpu

    def rotate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (fast if self.is_neox_style else type(self).forward_native)(self, *args, **kwargs)

    RotaryEmbedding.forward_cpu = rotate


def meet_over_gloo() -> None:
    """Let ranks exchange tensors over torch's process group."""
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
