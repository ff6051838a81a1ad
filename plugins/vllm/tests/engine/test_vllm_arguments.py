"""Options beside the argument class of the real vLLM: the same names and types; what is given reaches the engine."""

import dataclasses
import enum
import json
import typing

import pytest
import vllm
from vllm import EngineArgs

from powertrain import EngineSpec, GenerateRequest, SamplingParams
from powertrain.errors import ConfigError, Violations
from powertrain.options import convert
from powertrain.testing.tensors.models import tiny_model
from powertrain.testing.tensors.reference import replay
from powertrain_vllm import arguments
from powertrain_vllm.engine import VllmEngine
from powertrain_vllm.hooks import OPTIONS
from powertrain_vllm.settings import OWN, REFUSED, typed

FIELDS = {field.name: field for field in dataclasses.fields(EngineArgs) if not field.name.startswith("_")}
TABLE = {option.name: option for option in OPTIONS}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


async def built(model, **options):
    engine = VllmEngine()
    engine.prepare({})
    try:
        await engine.build(EngineSpec(backend="vllm", role="infer", model=model, options=options))
    except BaseException:
        await engine.close()
        raise
    return engine


def members(hint):
    """Return all that a type allows, unions taken apart."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) in {typing.Literal, None} or not inner:
        return [hint]
    union = "Union" in str(typing.get_origin(hint))
    return [member for part in inner for member in members(part)] if union else [hint]


def test_names_are_those_of_the_class():
    assert set(TABLE) == set(FIELDS) | set(OWN)
    assert set(FIELDS) >= set(REFUSED)


def test_shipped_list_begins_with_this_versions():
    told = json.loads(arguments.SHIPPED.read_text())
    assert told["versions"][0] == vllm.__version__.partition("+")[0]
    here = arguments.installed()
    assert list(arguments.shipped().items())[: len(here)] == list(here.items())
    assert len(arguments.shipped()) - len(here) < 20, "what only earlier versions have"


def test_types_take_the_defaults_of_the_class():
    """What vLLM itself would set must be a value that the option takes, whatever else its annotation says."""
    kinds = {bool: "bool", list: "list", dict: "mapping"}
    found, wanted = {}, {}
    for name, field in FIELDS.items():
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        if default is None:
            continue
        option = TABLE[name]
        if isinstance(default, enum.Enum):
            found[name], wanted[name] = option.type, "str"
        elif isinstance(default, str | int | float | list | dict | set):
            value = list(default) if isinstance(default, set) else default
            least = option.minimum is not None and value < option.minimum  # vLLM's word for "as the model says"
            found[name] = (value if least or value == "" else convert(option, value), option.type)
            wanted[name] = (value, kinds.get(type(value), option.type))
        else:
            found[name], wanted[name] = option.type, "mapping"
    assert found == wanted
    assert len(found) > 150


def test_choices_are_those_of_the_class():
    found = {name: list(option.choices) for name, option in TABLE.items() if option.choices and name in FIELDS}
    wanted = {}
    for name in found:
        literals = [part for part in members(FIELDS[name].type) if typing.get_origin(part) is typing.Literal]
        wanted[name] = list(dict.fromkeys(choice for literal in literals for choice in _all(literal)))
    del found["dtype"]  # ours are fewer
    del wanted["dtype"]
    assert found == wanted
    assert len(found) > 25


def _all(literal):
    return [x for part in typing.get_args(literal) for x in (_all(part) if typing.get_args(part) else [part])]


def test_plain_values_become_what_vllm_wants():
    found = typed(
        {
            "cudagraph_capture_sizes": ["1", "4"],
            "cpu_offload_params": ["a", "b"],
            "structured_outputs_config": {"backend": "xgrammar"},
            "compilation_config": {"mode": 0},
            "pt_load_map_location": '{"cuda:1": "cuda:0"}',
            "block_size": 16,
        }
    )
    assert found["cudagraph_capture_sizes"] == [1, 4]
    assert found["cpu_offload_params"] == {"a", "b"}
    assert found["structured_outputs_config"].backend == "xgrammar"
    assert found["compilation_config"].mode == 0
    assert found["pt_load_map_location"] == {"cuda:1": "cuda:0"}
    assert found["block_size"] == 16


def test_value_that_does_not_fit_names_argument_and_place():
    with pytest.raises(ConfigError, match=r"vllm\?cudagraph_capture_sizes is \['x'\].*0: .*integer"):
        typed({"cudagraph_capture_sizes": ["x"]})
    with pytest.raises(ConfigError, match=r"vllm\?compilation_config is .*which vLLM does not take: modus"):
        typed({"compilation_config": {"modus": 0}})


async def test_what_is_given_reaches_the_engine(model):
    given = {
        "max_model_len": 64,
        "block_size": 32,
        "max_num_seqs": 7,
        "scheduling_policy": "priority",
        "prefix_caching_hash_algo": "sha256_cbor",
        "compilation_config": {"splitting_ops": ["powertrain::none"]},
        "hf_overrides": {"rope_theta": 7777.0},
        "optimization_level": "0",
        "max_cpu_loras": None,
        "a_newer_version's": None,
    }
    engine = await built(model, **given)
    try:
        config = engine._form._engine.vllm_config
        assert config.cache_config.block_size == 32
        assert config.cache_config.prefix_caching_hash_algo == "sha256_cbor"
        assert (config.scheduler_config.max_num_seqs, config.scheduler_config.policy) == (7, "priority")
        assert config.compilation_config.splitting_ops == ["powertrain::none"]
        assert config.model_config.max_model_len == 64
        assert config.model_config.hf_overrides == {"rope_theta": 7777.0, "head_dtype": "float32"}
        assert int(config.optimization_level) == 0
        assert config.lora_config is None
        await engine.resume("1.1")
        sampling = SamplingParams(max_tokens=4)
        answer = await engine.generate(GenerateRequest(request_id="r", prompt=[3, 4], sampling=sampling))
        assert len(answer.completions[0].tokens) == 4
    finally:
        await engine.close()


async def test_arguments_about_scheduling_change_no_logprob(model):
    given = {
        "max_model_len": 128,
        "stream_interval": 3,
        "long_prefill_token_threshold": 16,
        "disable_log_stats": False,
    }
    engine = await built(model, **given)
    try:
        config = engine._form._engine.vllm_config.scheduler_config
        assert (config.stream_interval, config.long_prefill_token_threshold) == (3, 16)
        await engine.resume("1.1")
        prompt = [(7 * i) % 61 + 1 for i in range(50)]
        sampling = SamplingParams(max_tokens=20, n=3)
        answer = await engine.generate(GenerateRequest(request_id="r", prompt=prompt, sampling=sampling))
        for one in answer.completions:
            assert abs(replay(model, prompt, one.tokens.tolist()) - one.logprobs_t1).max() < 1e-4
    finally:
        await engine.close()


async def test_wrong_arguments_are_told_when_the_engine_is_built(model):
    with pytest.raises(Violations, match=r"unknown option 'blocksize' \(did you mean 'block_size'\?\)"):
        await built(model, blocksize=16)
    with pytest.raises(Violations, match=r"vllm\?tensor_parallel_size is 2; .*axis t in the config string"):
        await built(model, tensor_parallel_size=2)
    with pytest.raises(
        ConfigError, match=r"^vLLM .* does not start with these arguments: Value error, max_num_batched"
    ):
        await built(model, max_num_batched_tokens=4, max_model_len=64, enable_chunked_prefill=False)
