"""The spec of the backend `vllm`.

Options carry the names of vLLM's engine arguments: the usual ones are described here, all others of the installed
version are taken too. One that is not given is left to vLLM's own default.
"""

from __future__ import annotations

from typing import Any, cast

from powertrain.hookspecs import hookimpl
from powertrain.options import OptionSpec
from powertrain.specs import BackendSpec, Support
from powertrain_vllm.arguments import Arguments
from powertrain_vllm.settings import OWN, REFUSED

DESCRIBED = (
    OptionSpec(
        name="max_adapters", type="int", default=4, minimum=1, help="LoRA adapters kept; the oldest unused goes."
    ),
    OptionSpec(
        name="stale_adapter", default="refuse", choices=("refuse", "newest"), help="What a dropped adapter's name gets."
    ),
    OptionSpec(
        name="untested_version", default="refuse", choices=("refuse", "allow"), help="A vLLM outside the tested range."
    ),
    OptionSpec(
        name="form",
        default="process",
        choices=("process", "server"),
        help="vLLM in the worker's process, or its OpenAI server beside it.",
    ),
    OptionSpec(name="url", help="With form=server: attach to the server that runs there; it is never stopped."),
    OptionSpec(name="api_key_env", help="Variable that holds the API key of the server at `url`."),
    OptionSpec(name="enable_lora", type="bool", help="Make room for LoRA adapters; follows from the run."),
    OptionSpec(
        name="gpu_memory_utilization",
        type="float",
        minimum=0.0,
        maximum=1.0,
        help="Share of each card's memory that the engine may take, weights and KV cache together.",
    ),
    OptionSpec(name="max_model_len", type="int", minimum=1, help="Longest sequence in tokens, prompt included."),
    OptionSpec(
        name="dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="Type of weights and activations.",
    ),
    OptionSpec(name="enforce_eager", type="bool", help="Run without captured graphs and compilation."),
    OptionSpec(name="max_num_seqs", type="int", minimum=1, help="Most sequences in one step."),
    OptionSpec(name="max_num_batched_tokens", type="int", minimum=1, help="Most tokens in one step."),
    OptionSpec(name="enable_prefix_caching", type="bool", help="Reuse the KV cache of common prefixes."),
    OptionSpec(name="enable_chunked_prefill", type="bool", help="Split long prompts over several steps."),
    OptionSpec(name="kv_cache_dtype", help="Type of the KV cache, `auto` for the weights' own."),
    OptionSpec(name="quantization", help="Method by which the weights are quantised."),
    OptionSpec(name="max_lora_rank", type="int", minimum=1, help="Largest rank of an adapter; follows from the run."),
    OptionSpec(name="trust_remote_code", type="bool", help="Run code that a model repository brings."),
)
OPTIONS = Arguments(DESCRIBED, OWN, REFUSED)


@hookimpl
def powertrain_backend() -> BackendSpec:
    """Describe the backend: instances of p * t cards, t the fastest; e spreads experts over an instance's cards."""
    return BackendSpec(
        name="vllm",
        role="infer",
        engine="powertrain_vllm.engine:VllmEngine",
        manifest="powertrain_vllm.manifest:manifest",
        environment="powertrain_vllm.environment:environment",
        summary="vLLM in a worker's process, CPU or GPU; several cards an instance in workers",
        axes=("d", "p", "t", "e"),
        options=cast("Any", OPTIONS),  # a sequence that is read on use
        requires=("vllm",),
        install="pip install 'powertrain-vllm[engine]'",
        capabilities={
            "fp32_head": Support.FULL,
            "determinism": Support.FULL,
            "lora": Support.PARTIAL,
            "colocated": Support.FULL,
            "offload": Support.PARTIAL,
            "pause_keep": Support.FULL,
            "shared_storage": Support.NONE,
            "streaming": Support.PARTIAL,
        },
    )


def lora_ranks() -> tuple[int, ...]:
    """Return the values that the installed vLLM's `max_lora_rank` takes, none if any."""
    found = next((option.choices for option in OPTIONS if option.name == "max_lora_rank"), ())
    return tuple(int(rank) for rank in found or ())
