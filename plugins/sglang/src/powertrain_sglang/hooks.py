"""The spec of the backend `sglang`. The engine is not there yet: config strings with it are explained, not run.

Options carry the names of SGLang's server arguments; one that is not given is left to SGLang's own default.
"""

from __future__ import annotations

from powertrain.hookspecs import hookimpl
from powertrain.options import OptionSpec
from powertrain.specs import BackendSpec

OPTIONS = (
    OptionSpec(
        name="mem_fraction_static",
        type="float",
        minimum=0.0,
        maximum=1.0,
        help="Share of each card's memory for weights and KV cache.",
    ),
    OptionSpec(name="attention_backend", help="Attention kernels, such as fa3, flashinfer, triton or torch_native."),
    OptionSpec(name="sampling_backend", help="Sampling kernels, such as flashinfer or pytorch."),
    OptionSpec(name="context_length", type="int", minimum=1, help="Longest sequence in tokens, prompt included."),
    OptionSpec(
        name="dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="Type of weights and activations.",
    ),
    OptionSpec(name="max_running_requests", type="int", minimum=1, help="Most requests in one step."),
    OptionSpec(name="max_total_tokens", type="int", minimum=1, help="Size of the KV cache in tokens."),
    OptionSpec(
        name="chunked_prefill_size", type="int", minimum=-1, help="Tokens of a prompt chunk; -1 for whole prompts."
    ),
    OptionSpec(name="disable_cuda_graph", type="bool", help="Run without captured graphs."),
    OptionSpec(name="disable_radix_cache", type="bool", help="Do not reuse the KV cache of common prefixes."),
    OptionSpec(name="kv_cache_dtype", help="Type of the KV cache, `auto` for the weights' own."),
    OptionSpec(name="quantization", help="Method by which the weights are quantised."),
    OptionSpec(name="trust_remote_code", type="bool", help="Run code that a model repository brings."),
)


@hookimpl
def powertrain_backend() -> BackendSpec:
    """Describe the backend: instances of p * t cards, t the fastest; e spreads experts over an instance's cards."""
    return BackendSpec(
        name="sglang",
        role="infer",
        engine="powertrain_sglang.engine:SglangEngine",
        manifest="powertrain_sglang.manifest:manifest",
        summary="SGLang servers",
        axes=("d", "p", "t", "e"),
        options=OPTIONS,
        requires=("sglang",),
        install="pip install 'powertrain-sglang[engine]'",
        status="planned",
        api=(1, 0),
    )
