"""LoRA names: PEFT's own, matching with aliases (B07), pairs, versioned adapter names, PEFT's configuration."""

import json

import pytest

from powertrain.errors import ConfigError
from powertrain.interfaces.build import LoraSpec
from powertrain.tensors.lora import adapter_config, disk_key, match, module_of, parse_adapter_name, tensor_key
from powertrain.weights.version import WeightVersion

MODULE = "model.layers.0.self_attn.q_proj"
PEFT_KEY = f"base_model.model.{MODULE}"
DEEPER = "base_model.model.model.language_model.layers.0.self_attn.q_proj"


def pair(root):
    return [f"{root}.lora_A.weight", f"{root}.lora_B.weight"]


@pytest.mark.parametrize("root", [PEFT_KEY, MODULE])
def test_prefix_is_cut_only_where_it_stands(root):
    assert match(pair(root), {MODULE}) == dict.fromkeys(pair(root), MODULE)
    assert module_of(f"{root}.lora_A.weight") == MODULE


def test_key_that_matches_no_module_is_named():
    with pytest.raises(ConfigError, match="0 of its weights match") as caught:
        match(pair(DEEPER), {MODULE})
    assert [key for key in pair(DEEPER) if repr(key) not in str(caught.value)] == []
    assert f"did you mean {MODULE!r}" in str(caught.value)


def test_one_stray_key_among_good_ones_is_an_error():
    with pytest.raises(ConfigError, match="2 of its weights match") as caught:
        match([*pair(PEFT_KEY), *pair(f"{PEFT_KEY}x")], {MODULE})
    assert f"{PEFT_KEY}x.lora_B.weight" in str(caught.value)


@pytest.mark.parametrize(
    ("root", "modules", "alias"),
    [
        (DEEPER, {MODULE}, ("model.language_model.", "model.")),
        (PEFT_KEY, {f"language_model.{MODULE}"}, ("", "language_model.")),
        (PEFT_KEY, {"language_model.layers.0.self_attn.q_proj"}, ("model.", "language_model.")),
    ],
)
def test_alias_leads_to_the_receivers_root(root, modules, alias):
    assert set(match(pair(root), modules, aliases=[("nothing.", "else."), alias]).values()) == modules


def test_alias_is_not_used_where_the_name_fits():
    both = {MODULE, f"language_model.{MODULE}"}
    assert set(match(pair(PEFT_KEY), both, aliases=[("", "language_model.")]).values()) == {MODULE}


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (pair(PEFT_KEY)[:1], "only side A"),
        (pair(PEFT_KEY)[1:], "only side B"),
        ([*pair(PEFT_KEY), *pair(MODULE)], "are both side A"),
        ([], "no weights"),
        ([*pair(PEFT_KEY), f"{PEFT_KEY}.weight"], "not the name of a LoRA weight"),
        ([*pair(PEFT_KEY), f"{PEFT_KEY}.lora_magnitude_vector.weight"], "not the name of a LoRA weight"),
    ],
)
def test_adapter_that_does_not_fit_is_refused(keys, told):
    with pytest.raises(ConfigError, match=told):
        match(keys, {MODULE})


def test_many_faults_are_cut_short_with_their_number():
    keys = [key for layer in range(20) for key in pair(f"base_model.model.other.{layer}")]
    with pytest.raises(ConfigError, match="and 32 more"):
        match(keys, {MODULE})


@pytest.mark.parametrize("adapter", ["default", "policy", "policy-v2.17"])
def test_adapters_own_name_stays_off_the_disk(adapter):
    assert disk_key(tensor_key(MODULE, "A", adapter=adapter)) == f"{PEFT_KEY}.lora_A.weight"
    assert disk_key(f"{MODULE}.lora_B.{adapter}.weight") == f"{PEFT_KEY}.lora_B.weight"


def test_third_side_is_refused():
    with pytest.raises(ConfigError, match="not 'C'"):
        tensor_key(MODULE, "C")


@pytest.mark.parametrize("base", ["policy", "my-v1-policy", "a-v2.3"])
def test_versioned_adapter_name_is_read_back(base):
    version = WeightVersion(2, 17)
    assert parse_adapter_name(version.adapter_name(base)) == (base, version)


@pytest.mark.parametrize("name", ["policy", "-v1.2", "policy-v1", "policy-vx.y"])
def test_unversioned_adapter_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"2\.17"):
        parse_adapter_name(name)


def test_configuration_names_its_base_model():
    assert adapter_config(LoraSpec(), base_model="tiny")["base_model_name_or_path"] == "tiny"
    assert adapter_config(LoraSpec(alpha=0.5))["lora_alpha"] == 0.5


def test_peft_reads_the_configuration_and_uses_the_names(tmp_path):
    peft = pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    spec = LoraSpec(rank=4, alpha=12.0, dropout=0.25, targets=("q_proj", "v_proj"))
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config(spec)))
    config = peft.PeftConfig.from_pretrained(str(tmp_path))
    assert (config.r, config.lora_alpha, config.lora_dropout, config.target_modules) == (
        4,
        12,
        0.25,
        {"q_proj", "v_proj"},
    )
    config.task_type = None
    layer = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8) for name in ("q_proj", "v_proj", "o_proj")})
    model = peft.get_peft_model(torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])}), config)
    memory = {name for name, _ in model.named_parameters() if ".lora_" in name}
    disk = set(peft.get_peft_model_state_dict(model))
    assert {disk_key(name) for name in memory} == disk
    assert set(match(disk, [f"layers.0.{name}" for name in spec.targets]).values()) == {
        "layers.0.q_proj",
        "layers.0.v_proj",
    }
