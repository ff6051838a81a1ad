"""The spec of the backend `archon`. The engine is not there yet: config strings with it are explained, not run.

Options carry the names that users of Archon configurations know; one that is not given has the default shown here.
"""

from __future__ import annotations

from powertrain.hookspecs import hookimpl
from powertrain.options import OptionSpec
from powertrain.specs import BackendSpec

OPTIONS = (
    OptionSpec(name="etp", type="int", default=1, minimum=1, help="Tensor parallel size of the expert layers."),
    OptionSpec(name="attn_type", default="varlen", choices=("varlen", "sdpa"), help="Attention kernels."),
    OptionSpec(name="enable_compile", type="bool", default=False, help="Compile the transformer blocks."),
    OptionSpec(name="offload_params", type="bool", default=False, help="Keep sharded parameters in host memory."),
    OptionSpec(
        name="ac_mode",
        default="selective",
        choices=("none", "full", "selective", "memory_budget"),
        help="What the backward pass computes again.",
    ),
    OptionSpec(
        name="ac_memory_budget",
        type="float",
        default=0.5,
        minimum=0.0,
        maximum=1.0,
        help="With ac_mode=memory_budget: 0 recomputes most, 1 nothing.",
    ),
    OptionSpec(
        name="pp_schedule",
        default="Interleaved1F1B",
        choices=("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"),
        help="Order of forward and backward passes over pipeline stages.",
    ),
    OptionSpec(
        name="pp_layers_per_stage", type="int", minimum=1, help="Layers of a pipeline stage; not given, dealt evenly."
    ),
    OptionSpec(
        name="reshard_after_forward_policy",
        default="default",
        choices=("default", "always", "never"),
        help="Whether gathered parameters are freed between forward and backward; default: unless p is above 1.",
    ),
)


@hookimpl
def powertrain_backend() -> BackendSpec:
    """Describe the backend; ranks are numbered with t the fastest and p the slowest."""
    return BackendSpec(
        name="archon",
        role="train",
        engine="powertrain_archon.engine:ArchonEngine",
        summary="torch-native training in four and more dimensions",
        axes=("p", "d", "c", "t", "e"),
        options=OPTIONS,
        requires=("torch", "transformers"),
        install="pip install 'powertrain-archon[engine]'",
        status="planned",
        api=(1, 0),
    )
