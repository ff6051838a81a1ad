"""What vLLM is started with: the engine arguments that follow from a run, and those that its user gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from powertrain.errors import ConfigError, Violations
from powertrain.options import shown
from powertrain_vllm.configs import overrides

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec

OWN: Final = ("max_adapters", "stale_adapter", "untested_version", "form", "url", "api_key_env")
"""Options that are this plugin's and not vLLM's."""
_WHY: Final[Mapping[str, str]] = {
    "model model_weights": "the run's key `model` names the weights of both sides",
    "revision code_revision": "the run's model is a folder by the time vLLM starts; give that revision as `model`",
    "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init": (
        "requests and answers are token ids, and vLLM is started without a tokenizer"
    ),
    "hf_token": "it would be written into the run's folder; set the variable HF_TOKEN",
    "seed": "give the run's key `seed`",
    "tensor_parallel_size": "write axis t in the config string, as in vllm:d1t2",
    "pipeline_parallel_size": "write axis p in the config string, as in vllm:d1p2",
    "enable_expert_parallel": "write axis e in the config string, as in vllm:d1t2e2",
    "prefill_context_parallel_size": "this backend has no axis for it",
    "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
    "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_backend "
    "data_parallel_multi_port_external_lb": "each instance is an engine of its own; write axis d, as in vllm:d2",
    "distributed_executor_backend worker_cls worker_extension_cls master_addr master_port nnodes node_rank "
    "device_ids": "powertrain starts an engine's ranks and gives each its card",
    "enable_eplb eplb_config enable_elastic_ep elastic_ep_max_dp_size": (
        "vLLM would move experts while it runs, and new weights would go to where they were"
    ),
    "weight_transfer_config": "weights arrive by powertrain's transfers; name one in the config string by `via`",
    "kv_transfer_config kv_offloading_size": (
        "what lies outside of the engine's own KV cache would outlive an update of the weights"
    ),
    "logprobs_mode max_logprobs": (
        "every token comes with two log-probs, of the distribution it was drawn from and of the one at temperature 1"
    ),
    "speculative_config spec_method spec_model spec_tokens watermark_config use_fp64_gumbel return_sampling_mask "
    "enable_batch_sharded_sampling": "tokens are drawn by powertrain's own sampler, which knows nothing of it",
    "runner convert pooler_config": "this engine generates",
}
REFUSED: Final = {name: why for names, why in _WHY.items() for name in names.split()}
"""Arguments that a user cannot give -> why, or what to give in their place."""


def check(options: Mapping[str, Any], spec: EngineSpec) -> None:
    """Refuse what goes against the run; torch-free, called before a worker starts and again in it.

    options: resolved, None where an option is not given. `Violations` with every fault.
    """
    problems = list(_problems(options, spec))
    if problems:
        raise Violations(problems)


def _problems(options: Mapping[str, Any], spec: EngineSpec) -> Iterator[str]:
    given = {name: value for name, value in options.items() if value is not None}
    for name in sorted(given.keys() & REFUSED.keys()):
        yield f"vllm?{name} is {shown(given[name])}; powertrain sees to that itself: {REFUSED[name]}"
    if given.get("dtype", "auto") not in {"auto", spec.dtype}:
        which = f"vllm?dtype={given['dtype']}, and the run's dtype is {spec.dtype}"
        yield f"{which}; give the run's own key `dtype`, for both sides"
    if "head_dtype" in given.get("hf_overrides", {}):
        yield "vllm?hf_overrides has 'head_dtype'; give the run's key `head.fp32`, for both sides"
    if given.get("load_format") == "dummy":
        yield "vllm?load_format=dummy; until the first update random weights would answer, so leave it out"
    yield from _of_adapters(given, spec)


def _of_adapters(given: Mapping[str, Any], spec: EngineSpec) -> Iterator[str]:
    places, kept = given.get("max_loras", 1), given.get("max_adapters", 1)
    if places > kept:
        yield f"vllm?max_loras={places} adapters in a batch, and max_adapters={kept} are kept; raise max_adapters"
    if given.get("max_cpu_loras", kept + 1) <= kept:
        which = f"vllm?max_cpu_loras={given['max_cpu_loras']}, and max_adapters={kept} are kept"
        yield f"{which} and one more while it is loaded; leave it out, or lower max_adapters"
    if spec.lora is None:
        return
    if given.get("enable_lora") is False:
        yield f"vllm?enable_lora=false, and the run trains adapter {spec.lora.name!r}; leave it out, or `lora`"
    if given.get("max_lora_rank", spec.lora.rank) < spec.lora.rank:
        yield (
            f"vllm?max_lora_rank={given['max_lora_rank']}, and the run trains an adapter of rank {spec.lora.rank}; "
            "leave it out, and it follows from the rank"
        )
    if beyond := [name for name in spec.lora.targets if name not in given.get("lora_target_modules", [name])]:
        which = f"vllm?lora_target_modules lacks {', '.join(map(repr, beyond))}, which the run's adapter is for"
        yield f"{which}; leave it out, or take them out of lora.targets"


def engine_arguments(
    spec: EngineSpec, options: Mapping[str, Any], *, native_head: bool, ranks: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Return vLLM's engine arguments by name; options: resolved, None where vLLM's default holds.

    native_head: this version has the model config's `head_dtype`. ranks: the values that its `max_lora_rank` takes,
    none if any. What a user gives wins over what only suits most runs; what a run's promises rest on (model, dtype,
    seed, ranks) cannot be given: `Violations`.
    """
    check(options, spec)
    given = {name: value for name, value in options.items() if name not in OWN and value is not None}
    cuda = spec.place.device == "cuda"
    suits: dict[str, Any] = {
        "enforce_eager": not cuda,
        "disable_log_stats": True,
        "generation_config": "vllm",
        "enable_lora": spec.lora is not None,
    }
    if cuda:
        suits["enable_sleep_mode"] = True
    if given.get("enable_lora", suits["enable_lora"]):
        kept = options["max_adapters"]
        suits |= {"max_loras": kept, "max_cpu_loras": kept + 1}  # a new one is there before an old one goes
        suits |= {} if spec.lora is None else {"max_lora_rank": _room(spec.lora.rank, ranks)}
    head = {"head_dtype": "float32"} if native_head and spec.head.fp32 else {}
    fixed = {
        "model": spec.model,
        "dtype": spec.dtype,
        "seed": spec.seed % 2**31,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": spec.axes.get("t", 1),
        "pipeline_parallel_size": spec.axes.get("p", 1),
        "enable_expert_parallel": spec.axes.get("e", 1) > 1,
        "hf_overrides": {**overrides(spec.model), **given.get("hf_overrides", {}), **head},
    }
    return {**suits, **given, **fixed}


def _room(rank: int, ranks: tuple[int, ...]) -> int:
    """Return the least of vLLM's ranks that an adapter fits in."""
    found = min((most for most in ranks if most >= rank), default=None)
    if found is None and ranks:
        message = f"the run trains an adapter of rank {rank}, and this vLLM takes at most {max(ranks)}; lower lora.rank"
        raise ConfigError(message)
    return found or rank


def typed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments in the types that the installed vLLM wants, where plain data are not those; imports vLLM.

    Lists get their elements' type, mappings become vLLM's records, as its own command line does. ConfigError names an
    argument whose value does not fit.
    """
    import dataclasses
    import json

    from pydantic import TypeAdapter, ValidationError
    from vllm import EngineArgs

    hints = {field.name: field.type for field in dataclasses.fields(EngineArgs)}
    found = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, str) and value.lstrip().startswith("{"):  # where a text or a mapping is taken
            value = json.loads(value)
        if not isinstance(value, list | dict) or isinstance(hints.get(name), str):
            continue
        try:
            found[name] = TypeAdapter(hints[name]).validate_python(value)
        except (ValidationError, TypeError) as exc:
            message = f"vllm?{name} is {shown(value)}, which vLLM does not take: {in_a_line(exc)}"
            raise ConfigError(message) from exc
    return found


def in_a_line(exc: Exception) -> str:
    """Return in one line what vLLM has against arguments; of a pydantic error the places and reasons alone."""
    faults = getattr(exc, "errors", list)()
    places = (f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}".removeprefix(": ") for fault in faults)
    return "; ".join(places) or str(exc)
