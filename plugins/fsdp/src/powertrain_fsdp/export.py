"""HF-format export: a whole model, or the adapter alone when one is trained. Rank 0 writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor

from powertrain.errors import CheckpointError
from powertrain.tensors.lora import adapter_config
from powertrain.tensors.models import quietly
from powertrain_fsdp.source import named_weights

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain_fsdp.group import Group
    from powertrain_fsdp.model import Built

_TOKENIZER: Final = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "generation_config.json",
)


def export(folder: Path, built: Built, spec: EngineSpec, group: Group) -> None:
    """Gather each tensor in turn; parameters are written in the model's dtype. Collective, with CheckpointError."""
    dtype = built.compute
    state: dict[str, torch.Tensor] = {}
    for name, tensor in named_weights(built).items():
        plain = tensor.detach()
        whole = plain.full_tensor() if isinstance(plain, DTensor) else plain
        if group.rank == 0:
            kept = dtype if isinstance(tensor, torch.nn.Parameter) and whole.is_floating_point() else whole.dtype
            state[name] = whole.to("cpu", kept).contiguous()
    error: Exception | None = None
    if group.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if built.lora:
                _write_adapter(folder, state, spec)
            else:
                _write_model(folder, state, built)
        except (OSError, SafetensorError) as exc:
            error = exc
    group.agree(error, CheckpointError)


def _write_adapter(folder: Path, state: dict[str, torch.Tensor], spec: EngineSpec) -> None:
    from safetensors.torch import save_file

    assert spec.lora is not None
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = adapter_config(spec.lora, base_model=spec.model)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _write_model(folder: Path, state: dict[str, torch.Tensor], built: Built) -> None:
    model: Any = built.scorer.model
    state.update((alias, state[name]) for alias, name in built.tied.items())
    with quietly():
        model.save_pretrained(folder, state_dict=state)
    path = folder / "config.json"  # it names the dtype of the master weights, where there are any
    config = json.loads(path.read_text()) | {"dtype": str(built.compute).removeprefix("torch.")}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for pattern in _TOKENIZER:
        for path in Path(built.folder).glob(pattern):
            shutil.copyfile(path, folder / path.name)
