"""What powertrain has in a worker of vLLM: patches before the model is loaded, a seat after it."""

from __future__ import annotations

import contextlib
import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from powertrain.errors import ConfigError
from powertrain.tensors.serving import ServingSink
from powertrain.tensors.views import block_view, narrowed
from powertrain_vllm import base_rows, head
from powertrain_vllm.configs import check_rope
from powertrain_vllm.trace import checkpoint, running_manifest

if TYPE_CHECKING:
    from powertrain.weights import Manifest

USERS = ("vllm.model_executor.layers.linear", "vllm.model_executor.layers.vocab_parallel_embedding")
"""Modules that have taken vLLM's packing by name."""


def before_load(world: int = 1) -> None:
    """Let weights stay the parameters that vLLM computes with; called in every worker before its model is loaded.

    world: ranks of the engine; several meet over gloo, whose waits end, and not in vLLM's shared memory, in which a
    rank waits without end for one that is gone, and whose name all engines of a host would have in common.

    On a CPU vLLM copies the weights of linear layers into layouts of oneDNN's and others', and empties the parameters.
    A layer-wise reload makes these copies anew, but not that of a tied head, which goes on with the old weights and
    says nothing. Without the copies an update is written in place, and a tied head follows it. So it is with experts.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    with contextlib.suppress(ImportError):  # earlier versions have their experts elsewhere; `hold` refuses those
        from powertrain_vllm import cpu

        cpu.install()
        if world > 1:
            cpu.meet_over_gloo()
    from vllm.model_executor.layers import utils

    base_rows.mend()
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
    """Writes into a worker's parameters. forget: drops prefix caches. remote: whether its calls wait for a process."""

    remote = False

    def __init__(
        self,
        model: Any,
        manifest: Manifest,
        tensors: Mapping[str, torch.Tensor],
        folder: Path,
        forget: Callable[[], None],
    ) -> None:
        super().__init__(manifest, tensors, lambda: True)
        self._deriving, self._folder, self._forget = deriving(model), folder, forget

    def attach(
        self, paused: Callable[[], bool], arrived: Callable[[str, str], None], withdrawn: Callable[[str], None]
    ) -> None:
        """Let an engine say whether it is paused, and take adapters, as (name, folder); called once, by the engine."""
        self._paused, self._arrived, self._withdrawn = paused, arrived, withdrawn

    def refresh(self) -> None:
        """Make anew what vLLM derives from weights, and forget the prefix caches."""
        derive(self._deriving)
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
        check_rope(worker.vllm_config.model_config.model, model.modules())
        config = worker.vllm_config.model_config
        text = config.hf_text_config
        self.vocabulary = int(text.vocab_size)
        _see_to_stage(runner, model, config.dtype, fp32_head=fp32_head, native_head=native_head)
        runner.sampler = KeyedSampler(runner, self.vocabulary)
        self._folder = Path(tempfile.mkdtemp(prefix="powertrain-vllm-", dir=folder))
        parallel = worker.vllm_config.parallel_config
        world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        shapes = checkpoint(config.model)
        tied = {"lm_head.weight": "model.embed_tokens.weight"} if text.tie_word_embeddings else {}
        manifest, tensors = running_manifest(
            model, shapes, tied, rank=worker.rank, world=world, together=partial(_gathered, world)
        )
        if str(worker.vllm_config.load_config.load_format) != "dummy":
            hold(config.model, manifest, tensors)
        self.sink = VllmSink(model, manifest, tensors, self._folder, forget)

    def close(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _see_to_stage(runner: Any, model: Any, dtype: torch.dtype, *, fp32_head: bool, native_head: bool) -> None:
    """See to what only the last pipeline stage has, the head, and to what the first does not need."""
    from vllm.distributed import get_pp_group

    stage = get_pp_group()
    if not stage.is_first_rank and getattr(runner, "intermediate_tensors", None) is None:
        # What an earlier stage sends is put here; vLLM makes it when it warms up, which it does not on a CPU.
        runner.intermediate_tensors = model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=dtype, device=runner.device
        )
    if stage.is_last_rank:
        if fp32_head and not native_head:
            head.install(model)
        if getattr(runner, "lora_config", None):  # else the head would look for adapters of a batch that never was
            runner._set_active_loras((0,) * head.ROWS, (0,) * head.ROWS, set())
        head.check(model, dtype, fp32=fp32_head)


def _gathered(world: int, own: Mapping[str, str]) -> list[Mapping[str, str]]:
    """Return what every rank of the engine gave, in rank order; all call it together."""
    found: list[Any] = [own] * world
    if world > 1:
        from vllm.distributed import get_world_group

        torch.distributed.all_gather_object(found, dict(own), group=get_world_group().cpu_group)
    return found


def deriving(model: Any) -> list[Any]:
    """Return the attention layers that derive tensors from weights after loading (MLA's absorbed projections).

    What layers of other kinds do once with weights in a checkpoint's layout is not for these, and layers without
    weights derive nothing. ConfigError for copies that only a load makes.
    """
    after = "process_weights_after_loading"
    kinds = {type(module) for module in model.modules() if hasattr(module, after)}
    wanted = tuple(kind for kind in kinds if "act_dtype" in inspect.signature(getattr(kind, after)).parameters)
    found = [module for module in model.modules() if isinstance(module, wanted)]
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    for module in found:
        sinks = getattr(getattr(module, "impl", None), "sinks", None)
        if sinks is not None and sinks.untyped_storage().data_ptr() not in held:
            message = (
                f"{type(module.impl).__name__} keeps a copy of the attention sinks, which no update would reach; take "
                "another attention_backend"
            )
            raise ConfigError(message)
    return [module for module in found if any(True for _ in module.parameters())]


def derive(modules: Iterable[Any]) -> None:
    """Make anew, in its old memory, what these layers derive from weights.

    vLLM does this after loading. Captured graphs hold addresses, so results go where the earlier ones lay.
    """
    for module in modules:
        before = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
        with torch.no_grad():
            module.process_weights_after_loading(
                next((p.dtype for p in module.parameters()), torch.get_default_dtype())
            )
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
