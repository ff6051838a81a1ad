"""What powertrain has in a worker of vLLM: patches before the model is loaded, a seat after it."""

from __future__ import annotations

import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from powertrain.errors import ConfigError
from powertrain.tensors.serving import ServingSink
from powertrain.tensors.views import block_view, narrowed
from powertrain_vllm import head
from powertrain_vllm.trace import checkpoint, running_manifest

if TYPE_CHECKING:
    from powertrain.weights import Manifest

USERS = ("vllm.model_executor.layers.linear", "vllm.model_executor.layers.vocab_parallel_embedding")
"""Modules that have taken vLLM's packing by name."""


def before_load() -> None:
    """Let weights stay the parameters that vLLM computes with; called in every worker before its model is loaded.

    On a CPU vLLM copies the weights of linear layers into layouts of oneDNN's and others', and empties the parameters.
    A layer-wise reload makes these copies anew, but not that of a tied head, which goes on with the old weights and
    says nothing. Without the copies an update is written in place, and a tied head follows it.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils

    packing = utils.dispatch_cpu_unquantized_gemm
    if getattr(packing, "plain", False):
        return

    def plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            packing(layer, remove_weight)

    plain.plain = True  # type: ignore[attr-defined]
    for module in [utils, *(sys.modules[name] for name in USERS if name in sys.modules)]:
        if hasattr(module, packing.__name__):
            setattr(module, packing.__name__, plain)


class VllmSink(ServingSink):
    """Writes into a worker's parameters. forget: drops prefix caches."""

    def __init__(
        self,
        model: Any,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor],
        folder: Path,
        forget: Callable[[], None],
    ) -> None:
        super().__init__(manifest, tensors, lambda: True)
        self._model, self._folder, self._forget = model, folder, forget

    def attach(
        self, paused: Callable[[], bool], arrived: Callable[[str, str], None], withdrawn: Callable[[str], None]
    ) -> None:
        """Let an engine say whether it is paused, and take adapters, as (name, folder); called once, by the engine."""
        self._paused, self._arrived, self._withdrawn = paused, arrived, withdrawn

    def refresh(self) -> None:
        """Make anew what vLLM derives from weights, and forget the prefix caches."""
        derive(self._model)
        self._forget()

    def register(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Write an adapter that has arrived whole where vLLM can load it."""
        folder = Path(tempfile.mkdtemp(prefix="adapter-", dir=self._folder))
        plain = {key: value for key, value in config.items() if value is not None}
        (folder / "adapter_config.json").write_text(json.dumps(plain), encoding="utf-8")
        save_file(
            {key: tensor.contiguous().cpu() for key, tensor in tensors.items()}, folder / "adapter_model.safetensors"
        )
        try:
            self._arrived(name, str(folder))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def withdraw(self, name: str) -> None:
        """Forget an adapter that was never published."""
        self._withdrawn(name)


class Seat:
    """Made once in each worker when its model is loaded.

    worker: vLLM's. forget: drops prefix caches. Sampler and head are seen to; `sink` takes new weights.
    vocabulary: number of token ids. folder: where adapters are written, the system's for such things if not given.
    """

    def __init__(
        self,
        worker: Any,
        forget: Callable[[], None],
        *,
        fp32_head: bool,
        native_head: bool,
        folder: Path | None = None,
    ) -> None:
        from powertrain_vllm.sampler import KeyedSampler

        runner = worker.model_runner
        model = runner.get_model()
        config = worker.vllm_config.model_config
        text = config.hf_text_config
        self.vocabulary = int(text.vocab_size)
        if fp32_head and not native_head:
            head.install(model)
        if getattr(runner, "lora_config", None):  # else the head would look for adapters of a batch that never was
            runner._set_active_loras((0,) * head.ROWS, (0,) * head.ROWS, set())
        head.check(model, config.dtype, fp32=fp32_head)
        runner.sampler = KeyedSampler(runner, self.vocabulary)
        self._folder = Path(tempfile.mkdtemp(prefix="powertrain-vllm-", dir=folder))
        parallel = worker.vllm_config.parallel_config
        world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        shapes = checkpoint(config.model)
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if text.tie_word_embeddings else {}
        manifest, tensors = running_manifest(model, shapes, tied, rank=worker.rank, world=world)
        if str(worker.vllm_config.load_config.load_format) != "dummy":
            hold(config.model, manifest, tensors)
        self.sink = VllmSink(model, manifest, tensors, self._folder, forget)

    def close(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._folder, ignore_errors=True)


def derive(model: Any) -> None:
    """Make anew, in its old memory, what attention layers derive from weights (MLA's absorbed projections).

    vLLM calls this after loading. Captured graphs hold addresses, so results go where the earlier ones lay.
    """
    for module in model.modules():
        after = getattr(module, "process_weights_after_loading", None)
        if after is None or "act_dtype" not in inspect.signature(after).parameters:
            continue  # what layers of other kinds do once with weights in a checkpoint's layout is not for these
        before = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        with torch.no_grad():
            after(next((p.dtype for p in module.parameters()), torch.get_default_dtype()))
            for name, old in before.items():
                new = getattr(module, name)
                if new is not old and new.shape == old.shape and new.dtype == old.dtype:
                    old.copy_(new)
                    setattr(module, name, old)


def hold(folder: str, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> None:
    """Hold a manifest to what the checkpoint's values say: ConfigError where a box does not hold them.

    Some versions lay weights out anew after loading, which no loader shows; an update would then put right values
    into wrong places without an error. Of tensors whose names differ only in numbers the first and the last are read.
    """
    kinds: dict[str, list[Any]] = {}
    for entry in manifest:
        kinds.setdefault("".join(c for c in entry.name if not c.isdigit()), []).append(entry)
    wanted = {entry.name: entry for some in kinds.values() for entry in (some[0], some[-1])}
    for name, given in _values(folder, wanted):
        entry = wanted[name]
        for box in entry.boxes:
            part = narrowed(given, (0,) * given.dim(), box.start, box.size)
            found = block_view(tensors[box.storage], box.offset, box.size, box.stride)
            if not torch.equal(found.cpu(), part.to(found.dtype)):
                message = (
                    f"{box.storage!r} does not hold {name!r} where vLLM's loader puts it; this version lays weights "
                    "out anew after loading in a way that is not known here, so updates would be wrong"
                )
                raise ConfigError(message)


def _values(folder: str, names: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in names:
                    yield name, file.get_tensor(name)
