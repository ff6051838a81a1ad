"""Engine arguments of the installed vLLM as options, by its source; of a shipped list where there is none."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from powertrain import EngineSpec
from powertrain.errors import ConfigError, LayoutError, Violations
from powertrain.interfaces.build import HeadSpec, LoraSpec
from powertrain.layout import parse_layout
from powertrain.options import resolve
from powertrain.registry import Registry
from powertrain.run.config import resolve_config
from powertrain_vllm import arguments
from powertrain_vllm.adapters import check_targets
from powertrain_vllm.environment import environment
from powertrain_vllm.hooks import DESCRIBED, OPTIONS
from powertrain_vllm.settings import OWN, REFUSED, engine_arguments

SOURCE = """
    from dataclasses import dataclass
    from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Union
    from vllm.config import CompilationConfig, get_field
    from vllm.config.cache import CacheDType, Nested, Open, Overrides
    from vllm.config.lora import MaxLoRARanks
    from vllm.nowhere import Backend
    if TYPE_CHECKING:
        from vllm.config.quantization import QuantizationArgs

    @dataclass
    class EngineArgs:
        '''Arguments.'''
        model: str = CompilationConfig.model
        warp_speed: int = 1
        share: float | None = None
        eager: Optional[bool] = None
        names: str | list[str] | None = None
        params: set[str] = get_field(CompilationConfig, "params")
        limits: dict[str, int | dict[str, int]] = get_field(CompilationConfig, "limits")
        compilation_config: CompilationConfig = get_field(CompilationConfig, "compilation_config")
        quantized: "dict[str, Any] | QuantizationArgs | None" = None
        kv_cache_dtype: CacheDType = CompilationConfig.cache_dtype
        nested: Nested = "auto"
        open: Open = "auto"
        loosely: Nested | str = "auto"
        max_lora_rank: MaxLoRARanks = 16
        overrides: Overrides = None
        backend: Backend | None = None
        mixed: Literal["one", 2] = "one"
        token: bool | str | None = None
        where: Union[str, dict[str, str]] = "cpu"
        noted: Annotated[int, "a note"] = 1
        _private: int = 0

        def __post_init__(self):
            later: int = 3

    @dataclass
    class AsyncEngineArgs(EngineArgs):
        another: int = 0
"""
FILES = {
    "vllm/__init__.py": "raise RuntimeError('vllm was imported')",
    "vllm/engine/arg_utils.py": SOURCE,
    "vllm/config/__init__.py": "raise RuntimeError('vllm was imported')",
    "vllm/config/cache.py": """
        from vllm.elsewhere import Unseen
        CacheDType = Literal[
            "auto",
            "fp8",  # a note
        ]
        '''What it is.'''
        Few: TypeAlias = Literal["none", "some"]
        Nested = Literal["auto", Few]
        Open = Literal["auto", Unseen]
        Overrides = dict[str, Any] | Callable[[str], str]
    """,
    "vllm/config/lora.py": "MaxLoRARanks = Literal[4, 8, 16]",
}


RECIPE = {
    "engines": "fsdp:d1|vllm:d1",
    "model": "x/y",
    "recipe": "ppo",
    "ppo": {"data": "powertrain_ppo.tasks:sums", "reward": "powertrain_ppo.tasks:exact"},
}


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a vLLM on the path that has only sources, and that breaks when it is imported."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return tmp_path


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setattr(arguments, "find_spec", lambda name: None)


def options():
    return {option.name: option for option in OPTIONS}


def parsed(text):
    return parse_layout(text, registry=Registry()).parts[-1].options


def test_types_are_those_of_the_installed_versions_own_class(fake):
    found = {name: (option.type, option.choices) for name, option in options().items() if not option.listed}
    assert found == {
        "model": ("str", ()),
        "warp_speed": ("int", ()),
        "share": ("float", ()),
        "eager": ("bool", ()),
        "names": ("list", ()),
        "params": ("list", ()),
        "limits": ("mapping", ()),
        "compilation_config": ("mapping", ()),
        "quantized": ("mapping", ()),
        "nested": ("str", ("auto", "none", "some")),
        "open": ("str", ()),
        "loosely": ("str", ()),
        "overrides": ("mapping", ()),
        "backend": ("str", ()),
        "mixed": ("str", ()),
        "token": ("str", ()),
        "where": ("str", ()),
        "noted": ("int", ()),
    }


def test_options_are_made_once(fake):
    assert list(OPTIONS) == [OPTIONS[i] for i in range(len(OPTIONS))]
    assert all(one is other for one, other in zip(OPTIONS, OPTIONS, strict=True))


def test_described_arguments_stand_first_and_only_those_that_the_version_has(fake):
    listed = [option.name for option in OPTIONS if option.listed]
    assert listed == [*OWN, "kv_cache_dtype", "max_lora_rank"]
    assert [option.name for option in OPTIONS][: len(listed)] == listed
    assert options()["kv_cache_dtype"].choices == ("auto", "fp8")
    assert options()["max_lora_rank"].choices == (4, 8, 16)
    assert options()["max_lora_rank"].help


def test_any_argument_can_stand_in_the_config_string_and_in_the_recipe(fake):
    text = "vllm:d1?warp_speed=9&names=a,b&compilation_config='{\"level\": 3}'"
    given = {"warp_speed": 9, "names": ["a", "b"], "compilation_config": {"level": 3}}
    assert parsed(text) == given
    config = resolve_config({**RECIPE, "vllm": given})
    assert {name: config.layout.parts[1].options[name] for name in given} == given
    assert config.engine_options(config.layout.parts[1])["share"] is None
    dumped = config.to_mapping()["vllm"]
    assert {name: dumped[name] for name in given} == given
    assert "share" not in dumped
    assert resolve_config(config.to_mapping()).to_mapping() == config.to_mapping()


def test_unknown_argument_is_an_error_with_the_nearest_of_this_version(fake):
    with pytest.raises(LayoutError, match=r"no option 'warp_sped' \(did you mean 'warp_speed'\?\).* and 18 more"):
        parsed("vllm:d1?warp_sped=9")
    with pytest.raises(LayoutError, match=r"no option 'block_size'"):
        parsed("vllm:d1?block_size=9")
    with pytest.raises(Violations, match=r"unknown option 'warp_sped' \(did you mean 'warp_speed'\?\)"):
        resolve(OPTIONS, {"warp_sped": 9}, where="backend vllm")


def test_values_are_checked_where_the_type_says_what_they_are(fake):
    for text, told in {
        "warp_speed=fast": "needs a value of type int",
        "nested=sone": r"it takes auto, none, some \(did you mean 'some'\?\)",
        "compilation_config=3": "needs a value of type mapping",
        "max_lora_rank=5": "it takes 4, 8, 16",
    }.items():
        with pytest.raises(LayoutError, match=told):
            parsed(f"vllm:d1?{text}")


def test_without_vllm_the_shipped_list_serves(absent):
    assert parsed("vllm:d1?block_size=16") == {"block_size": 16}
    with pytest.raises(LayoutError, match=r"no option 'block_siz' \(did you mean 'block_size'\?\)"):
        parsed("vllm:d1?block_siz=16")
    assert set(options()) >= {option.name for option in DESCRIBED} | set(REFUSED)


def test_shipped_list_is_the_same_whatever_is_installed(fake):
    assert "warp_speed" in options()
    told = {option.name for option in OPTIONS.shipped}
    assert told.isdisjoint({"warp_speed", *REFUSED})
    assert told >= {"block_size", "max_model_len"}
    assert json.loads(arguments.SHIPPED.read_text())["versions"] == ["0.32.0", "0.23.0"]


def test_source_that_is_not_understood_leaves_the_shipped_list_and_says_so(fake, caplog):
    (fake / "vllm/engine/arg_utils.py").write_text("class Another:\n    pass\n")
    arguments._read.cache_clear()
    assert set(options()) >= {"block_size", "max_model_len"}
    assert "there is no class EngineArgs" in caplog.text
    arguments._read.cache_clear()


COMMANDS = {
    "explain": ["explain", "fsdp:d1|vllm:d1?warp_speed=9"],
    "dry-run": ["run", "recipe.yaml", "--dry-run"],
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_reading_a_config_imports_neither_vllm_nor_torch(fake, words):
    (fake / "recipe.yaml").write_text(json.dumps({**RECIPE, "vllm": {"warp_speed": 9}}))
    code = (
        "import sys; from powertrain.cli import main; assert main(sys.argv[1:]) == 0\n"
        "sys.stderr.write('heavy: ' + str([name for name in ('vllm', 'torch') if name in sys.modules]))"
    )
    env = {**os.environ, "PYTHONPATH": str(fake)}
    call = [sys.executable, "-c", code, *words]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, cwd=fake, env=env, check=False)
    assert "heavy: []" in done.stderr, done.stderr
    assert "warp_speed" in done.stdout


# ---- what powertrain sees to itself
def spec(**changes):
    return EngineSpec(**{"backend": "vllm", "role": "infer", "model": "m", **changes})


def made(options=None, **changes):
    values = {"max_adapters": 4, **(options or {})}
    return engine_arguments(spec(**changes), values, native_head=True, ranks=(1, 8, 16))


@pytest.mark.parametrize("name", REFUSED)
def test_argument_that_powertrain_sets_is_refused_before_anything_starts(name):
    with pytest.raises(
        Violations, match=rf"vllm\?{name} is 3; powertrain sees to that itself: \w.*{REFUSED[name][-12:]}"
    ):
        environment({name: 3}, spec())
    with pytest.raises(Violations, match=rf"vllm\?{name} is 3"):
        made({name: 3})
    assert name not in environment({name: None}, spec())


def test_all_that_is_refused_is_told_at_once():
    with pytest.raises(Violations, match=r"(?s)vllm\?seed is 3.*vllm\?tensor_parallel_size is 2"):
        made({"seed": 3, "tensor_parallel_size": 2})


def test_overrides_of_the_model_are_merged_with_the_heads_precision():
    mine = {"hf_overrides": {"rope_theta": 5.0}}
    assert made(mine)["hf_overrides"] == {"rope_theta": 5.0, "head_dtype": "float32"}
    assert made(mine, head=HeadSpec(fp32=False))["hf_overrides"] == {"rope_theta": 5.0}
    for word in ("bfloat16", "float32"):
        with pytest.raises(ConfigError, match=r"hf_overrides has 'head_dtype'.*head\.fp32"):
            made({"hf_overrides": {"head_dtype": word}})


def test_what_a_user_gives_wins_over_what_only_suits():
    assert made()["enforce_eager"] is True
    assert made({"enforce_eager": False, "block_size": 16})["enforce_eager"] is False
    assert made({"block_size": 16})["block_size"] == 16
    assert "block_size" not in made({"block_size": None})


def test_room_for_adapters_follows_from_the_run():
    lora = made(lora=LoraSpec(rank=9))
    assert (lora["enable_lora"], lora["max_lora_rank"], lora["max_loras"], lora["max_cpu_loras"]) == (True, 16, 4, 5)
    assert made({"max_lora_rank": 16}, lora=LoraSpec(rank=8))["max_lora_rank"] == 16
    plain = made()
    assert plain["enable_lora"] is False
    assert "max_lora_rank" not in plain
    assert made({"enable_lora": True})["max_loras"] == 4


def test_room_for_adapters_that_does_not_fit_the_run_is_refused():
    with pytest.raises(ConfigError, match=r"max_lora_rank=8, and the run trains an adapter of rank 16"):
        environment({"max_lora_rank": 8}, spec(lora=LoraSpec(rank=16)))
    with pytest.raises(ConfigError, match=r"rank 17, and this vLLM takes at most 16; lower lora\.rank"):
        made(lora=LoraSpec(rank=17))
    with pytest.raises(ConfigError, match=r"enable_lora=false, and the run trains adapter 'policy'"):
        environment({"enable_lora": False}, spec(lora=LoraSpec()))
    with pytest.raises(ConfigError, match=r"max_loras=5 adapters in a batch, and max_adapters=4"):
        made({"max_loras": 5})
    with pytest.raises(ConfigError, match=r"max_cpu_loras=4, and max_adapters=4 are kept and one more"):
        made({"max_cpu_loras": 4})
    assert made({"enable_lora": True, "max_loras": 2, "max_cpu_loras": 5})["max_loras"] == 2
    with pytest.raises(ConfigError, match=r"lora_target_modules lacks 'k_proj', which the run's adapter is for"):
        made({"lora_target_modules": ["q_proj"]}, lora=LoraSpec(targets=("q_proj", "k_proj")))


def test_random_weights_never_answer():
    with pytest.raises(ConfigError, match=r"load_format=dummy; until the first update random weights would answer"):
        environment({"load_format": "dummy"}, spec())
    assert made({"load_format": "safetensors"})["load_format"] == "safetensors"


def test_lora_targets_that_match_nothing_are_named():
    modules = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"]
    check_targets(["q_proj", "mlp.up_proj"], modules)
    with pytest.raises(ConfigError, match=r"no module 'q_prj' \(did you mean 'q_proj'\?\); it has: q_proj, up_proj"):
        check_targets(["q_prj", "up_proj"], modules)
    with pytest.raises(ConfigError, match="no module 'proj'"):
        check_targets(["proj"], modules)
