import json
import sys
from pathlib import Path

import pytest
import torch

from powertrain.errors import ConfigError
from powertrain.interfaces.build import LoraSpec, OptimSpec
from powertrain.interfaces.data import LossSpec
from powertrain_fsdp.engine import FsdpEngine

sys.path.insert(0, str(Path(__file__).parent / "modules"))
LOSS = LossSpec(name="powertrain_fsdp_test_losses:policy", entropy=True)
LORA = LoraSpec(rank=4, alpha=8.0, targets=("q_proj", "down_proj"), name="actor")


def _opened(spec):
    engine = FsdpEngine()
    engine.prepare({})
    engine.build(spec)
    return engine


def _unlora(model_folder, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    return PeftModel.from_pretrained(base, tmp_path)


def _logprobs(model, batch):
    out = []
    with torch.no_grad():
        for i in range(batch.size):
            begin, end, prompt = int(batch.starts[i]), int(batch.starts[i + 1]), int(batch.prompt_lens[i])
            ids = torch.from_numpy(batch.tokens[begin:end])[None]
            logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            out.append(logp[prompt - 1 :])
    return torch.cat(out)


@pytest.mark.parametrize("tied", [True, False])
def test_manifest_lists_hf_names_and_ties(make_spec, tied):
    with _opened(make_spec(tied=tied)) as engine:
        source = engine.weights()
        manifest, tensors = source.manifest(), source.tensors()
    names = [entry.name for entry in manifest]
    assert ("lm_head.weight" in names) is not tied
    assert manifest.tied == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert set(names) == set(tensors)
    for entry in manifest:
        [box] = entry.boxes
        assert (box.start, box.size, box.storage) == ((0,) * len(entry.shape), entry.shape, entry.name)


def test_source_shows_the_engine_s_own_memory(make_spec, batches):
    with _opened(make_spec()) as engine:
        source = engine.weights()
        before, pointers = source.changes(), {n: t.data_ptr() for n, t in source.tensors().items()}
        engine.logprobs(batches[0])
        assert source.changes() == before
        engine.train_step(batches[0], LOSS)
        source.fence()
        assert source.changes() != before
        assert {n: t.data_ptr() for n, t in source.tensors().items()} == pointers


def test_weights_written_from_outside_are_seen_at_once(make_spec, batches):
    with _opened(make_spec(optim=None)) as engine:
        first = engine.logprobs(batches[0])
        engine.weights().tensors()["model.embed_tokens.weight"].mul_(1.5)
        assert abs(engine.logprobs(batches[0]) - first).max() > 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_export_gives_the_same_model_and_tokenizer(make_spec, batches, tmp_path, tied):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = make_spec(tied=tied)
    with _opened(spec) as engine:
        engine.train_step(batches[0], LOSS)
        want = torch.from_numpy(engine.logprobs(batches[1]))
        engine.export(str(tmp_path / "out"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    scored = torch.from_numpy(batches[1].weights != 0)
    torch.testing.assert_close(_logprobs(model, batches[1]), want[scored], rtol=0, atol=1e-5)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) is tied
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == "{{ messages }}"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_export_is_in_the_model_s_dtype(make_spec, batches, tmp_path):
    from safetensors.torch import load_file

    with _opened(make_spec(dtype="bfloat16", options={"master_dtype": "float32"})) as engine:
        engine.export(str(tmp_path / "out"))
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_lora_trains_the_adapter_alone(make_spec, batches):
    with _opened(make_spec(lora=LORA, optim=OptimSpec(lr=1e-2))) as engine:
        base = {n: p.detach().clone() for n, p in engine._built.parameters.items()}
        for batch in batches:
            engine.train_step(batch, LOSS)
        moved = {n for n, p in engine._built.parameters.items() if not torch.equal(p, base[n])}
        manifest, tensors = engine.weights().manifest(), engine.weights().tensors()
    assert moved == {n for n in base if ".lora_" in n}
    assert manifest.kind == "adapter"
    assert manifest.meta["adapter"] == "actor"
    assert manifest.meta["adapter_config"]["r"] == 4
    assert len(manifest.entries) == len(tensors) == 2 * 2 * 2
    assert "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight" in manifest.by_name()


def test_exported_adapter_loads_in_peft(make_spec, batches, tmp_path):
    spec = make_spec(lora=LORA, optim=OptimSpec(lr=1e-2))
    with _opened(spec) as engine:
        for batch in batches:
            engine.train_step(batch, LOSS)
        want = torch.from_numpy(engine.logprobs(batches[1]))
        engine.export(str(tmp_path))
    assert {p.name for p in tmp_path.iterdir()} == {"adapter_model.safetensors", "adapter_config.json"}
    model = _unlora(spec.model, tmp_path)
    scored = torch.from_numpy(batches[1].weights != 0)
    torch.testing.assert_close(_logprobs(model, batches[1]), want[scored], rtol=0, atol=1e-5)


def test_new_adapter_changes_nothing_yet(make_spec, batches):
    with _opened(make_spec()) as full, _opened(make_spec(lora=LORA)) as adapted:
        assert abs(full.logprobs(batches[0]) - adapted.logprobs(batches[0])).max() < 1e-6


@pytest.mark.parametrize(
    ("target", "said"),
    [("c_attn", "'c_attn'"), ("qproj", r"'qproj' \(did you mean 'q_proj'\?\)"), ("proj", "'proj'"), ("", "''")],
)
def test_target_without_a_module_is_told_with_those_there_are(make_spec, target, said):
    engine = FsdpEngine()
    engine.prepare({})
    told = rf"lora.targets: LlamaForCausalLM has no module {said}.*; it has: down_proj, gate_proj, .*q_proj, .*v_proj$"
    with pytest.raises(ConfigError, match=told) as caught:
        engine.build(make_spec(lora=LoraSpec(targets=("q_proj", target))))
    assert "lm_head" not in str(caught.value)


def test_adapter_on_the_head_is_refused(make_spec):
    engine = FsdpEngine()
    engine.prepare({})
    with pytest.raises(ConfigError, match="LoRA targets"):
        engine.build(make_spec(tied=False, lora=LoraSpec(targets=("q_proj", "lm_head"))))


def test_persistent_buffers_travel_and_are_exported(make_spec, batches, tmp_path):
    from safetensors.torch import load_file

    from powertrain.tensors.sink import whole_manifest
    from powertrain.weights import plan_transfer

    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    with _opened(make_spec("deepseek", tied=False)) as engine:
        source = engine.weights()
        receiver = load_file(Path(engine._built.folder) / "model.safetensors")
        plan = plan_transfer([source.manifest()], [whole_manifest(receiver)])
        assert {block.name for block in plan.blocks} == set(receiver)
        assert source.tensors()[name].abs().min() > 0
        engine.train_step(batches[0], LOSS)
        scored = engine.logprobs(batches[0])
        bias = source.tensors()[name].clone()
        engine.export(str(tmp_path / "whole"))
        engine.save(str(tmp_path / "saved"))
        source.tensors()[name].zero_()
        engine.load(str(tmp_path / "saved"))
    with _opened(make_spec(model=str(tmp_path / "whole"), optim=None)) as engine:
        assert torch.equal(engine.weights().tensors()[name], bias)
        assert abs(engine.logprobs(batches[0]) - scored).max() < 1e-6
