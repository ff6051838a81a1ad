"""What powertrain knows of the `hf` backend before anything heavy is imported."""

from __future__ import annotations

from powertrain.hookspecs import hookimpl
from powertrain.options import OptionSpec
from powertrain.specs import BackendSpec, Support

OPTIONS = (
    OptionSpec(
        name="max_rows", type="int", default=128, minimum=1, help="Most completions that are decoded in one batch."
    ),
    OptionSpec(
        name="max_batch_tokens",
        type="int",
        default=131072,
        minimum=1,
        help="Most tokens of KV cache in one batch: rows times (longest prompt plus most new tokens).",
    ),
    OptionSpec(
        name="attention",
        default="sdpa",
        choices=("sdpa", "eager"),
        help="Attention implementation of transformers.",
    ),
    OptionSpec(
        name="max_adapters",
        type="int",
        default=4,
        minimum=1,
        help="Most LoRA adapters kept; the oldest that no request uses is dropped for a new one.",
    ),
)


@hookimpl
def powertrain_backend() -> BackendSpec:
    """Describe the backend."""
    return BackendSpec(
        name="hf",
        role="infer",
        engine="powertrain_hf.engine:HfEngine",
        manifest="powertrain_hf.manifest:manifest",
        summary="transformers in this process, CPU or GPU; one card an instance",
        axes=("d",),
        options=OPTIONS,
        capabilities={
            "fp32_head": Support.FULL,
            "determinism": Support.FULL,
            "lora": Support.FULL,
            "colocated": Support.FULL,
            "offload": Support.PARTIAL,
            "pause_keep": Support.FULL,
            "shared_storage": Support.FULL,
            "streaming": Support.NONE,
        },
        requires=("torch", "transformers", "peft", "safetensors"),
        install="pip install 'powertrain-hf[engine]'",
    )
