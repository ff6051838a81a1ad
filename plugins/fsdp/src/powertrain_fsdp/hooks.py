"""What powertrain knows of the `fsdp` backend before anything heavy is imported."""

from __future__ import annotations

from powertrain.hookspecs import hookimpl
from powertrain.options import OptionSpec
from powertrain.specs import BackendSpec, Support

OPTIONS = (
    OptionSpec(
        name="microbatch_tokens",
        type="int",
        default=2048,
        minimum=1,
        help="Most padded tokens of one forward pass; a longer row stands alone. Never changes gradients.",
    ),
    OptionSpec(
        name="packing",
        default="auto",
        choices=("auto", "shared", "packed", "padded"),
        help="How sequences are laid out in rows; auto takes the fastest that is right for the model.",
    ),
    OptionSpec(
        name="attention",
        default="sdpa",
        choices=("sdpa", "eager", "flash_attention_2", "flash_attention_3"),
        help="Attention implementation of transformers; the flash ones need their packages and a GPU.",
    ),
    OptionSpec(
        name="activation_checkpointing",
        type="bool",
        default=False,
        help="Compute activations again in the backward pass: less memory, about a third more time.",
    ),
    OptionSpec(
        name="master_dtype",
        default=None,
        choices=(None, "float32"),
        help="Hold weights, gradients and Adam moments in float32 while the model computes in its own dtype.",
    ),
    OptionSpec(
        name="shard",
        default="auto",
        choices=("auto", "always"),
        help="auto leaves a single rank unsharded where that is the same and faster.",
    ),
    OptionSpec(
        name="sync_each_microbatch",
        type="bool",
        default=False,
        help="Reduce gradients after every micro-batch: saves a full copy of them, costs traffic.",
    ),
    OptionSpec(
        name="model_inputs",
        type="list",
        default=[],
        help="Names of a batch's optional model inputs that may reach the model's forward.",
    ),
)


@hookimpl
def powertrain_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="fsdp",
        role="train",
        engine="powertrain_fsdp.engine:FsdpEngine",
        manifest="powertrain_fsdp.manifest:manifest",
        summary="torch FSDP2 data parallel training, gloo or NCCL",
        axes=("d",),
        options=OPTIONS,
        environment="powertrain_fsdp.needs:environment",
        capabilities={
            "fp32_head": Support.FULL,
            "determinism": Support.FULL,
            "lora": Support.FULL,
            "colocated": Support.FULL,
            "offload": Support.FULL,
            "checkpoint": Support.FULL,
            "export": Support.FULL,
            "packed": Support.PARTIAL,
            "shared_storage": Support.FULL,
        },
        requires=("torch", "transformers", "peft", "safetensors"),
        install="pip install 'powertrain-fsdp[engine]'",
    )
