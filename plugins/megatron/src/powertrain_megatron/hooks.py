"""The spec of the backend `megatron`. The engine is not there yet: config strings with it are explained, not run.

`etp` and `vpp` are the usual short names of Megatron's expert tensor and virtual pipeline sizes; the other options
carry the names of megatron-core's configuration fields, and one that is not given is left to its default there.
"""

from __future__ import annotations

from powertrain.hookspecs import hookimpl
from powertrain.options import OptionSpec
from powertrain.specs import BackendSpec

OPTIONS = (
    OptionSpec(name="etp", type="int", default=1, minimum=1, help="Tensor parallel size of the expert layers."),
    OptionSpec(name="vpp", type="int", default=1, minimum=1, help="Virtual pipeline stages on each pipeline rank."),
    OptionSpec(
        name="sequence_parallel", type="bool", help="Split activations along the sequence where t splits weights."
    ),
    OptionSpec(
        name="recompute_granularity", choices=("full", "selective"), help="What the backward pass computes again."
    ),
    OptionSpec(name="recompute_method", choices=("uniform", "block"), help="Which layers a full recompute covers."),
    OptionSpec(name="recompute_num_layers", type="int", minimum=1, help="Layers of one recompute unit."),
    OptionSpec(name="use_distributed_optimizer", type="bool", help="Shard the optimizer's state over d."),
    OptionSpec(name="overlap_grad_reduce", type="bool", help="Reduce gradients while the backward pass runs."),
    OptionSpec(name="overlap_param_gather", type="bool", help="Gather parameters while the forward pass runs."),
    OptionSpec(
        name="attention_backend",
        choices=("auto", "flash", "fused", "unfused", "local"),
        help="Attention kernels.",
    ),
    OptionSpec(
        name="moe_token_dispatcher_type",
        choices=("allgather", "alltoall", "flex"),
        help="How tokens travel to their experts.",
    ),
    OptionSpec(name="moe_grouped_gemm", type="bool", help="Multiply all local experts in one grouped kernel."),
)


@hookimpl
def powertrain_backend() -> BackendSpec:
    """Describe the backend; ranks are numbered as Megatron does by default, t the fastest and p the slowest."""
    return BackendSpec(
        name="megatron",
        role="train",
        engine="powertrain_megatron.engine:MegatronEngine",
        manifest="powertrain_megatron.manifest:manifest",
        summary="megatron-core training",
        axes=("p", "d", "c", "t", "e"),
        options=OPTIONS,
        requires=("megatron.core",),
        install="pip install 'powertrain-megatron[engine]'",
        status="planned",
        api=(1, 0),
    )
