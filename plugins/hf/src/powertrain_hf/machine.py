"""The model with its sink and adapters, and how a batch is run on it; everything of the engine that touches torch."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from powertrain.tensors.head import LMHead
from powertrain.tensors.hf_names import in_hf_names, places
from powertrain.tensors.serving import ServingSink
from powertrain.tensors.sink import whole_manifest
from powertrain_hf.adapters import Adapters
from powertrain_hf.decode import Decoder

if TYPE_CHECKING:
    from powertrain.interfaces.build import EngineSpec
    from powertrain_hf.scheduler import Chunk


class HfSink(ServingSink):
    """Writes into the model's parameters. There is no derived state but KV caches, which kept requests make anew."""

    def __init__(self, machine: Machine, model: Any, paused: Callable[[], bool]) -> None:
        tensors = model.state_dict(keep_vars=True)
        known = places(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        super().__init__(in_hf_names(whole_manifest(tensors, casts=True), known), tensors, paused)
        self._machine = machine

    def refresh(self) -> None:
        """Let kept requests prefill again before their next step."""
        self._machine.epoch += 1

    def register(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Take an adapter that has arrived whole."""
        self._machine.changed(lambda adapters: adapters.add(name, config, tensors))

    def withdraw(self, name: str) -> None:
        """Forget an adapter that was never published, and that no request can use."""
        self._machine.changed(lambda adapters: adapters.drop(name) if name in adapters.names() else None)


class Machine:
    """A loaded model. `start`, `again`, `step` and `stop` run on the compute thread, the rest on others' threads.

    epoch: rises whenever KV caches have become worthless.
    """

    def __init__(
        self,
        spec: EngineSpec,
        options: Mapping[str, Any],
        *,
        paused: Callable[[], bool],
        users: Callable[[], Iterable[str]],
    ) -> None:
        if spec.deterministic:
            from powertrain.tensors import determinism

            determinism.enable(spec.place.device)
        from powertrain.tensors.models import load_causal_lm

        self._model: Any = load_causal_lm(
            spec.model, dtype=spec.dtype, device=spec.place.device, attention=options["attention"]
        )
        self._model.eval().requires_grad_(False)
        self._device = spec.place.device
        self._head = LMHead.of(self._model, fp32=spec.head.fp32)
        self._lock = threading.Lock()
        self._decoders: dict[int, tuple[Decoder, int]] = {}
        self.vocabulary = int(self._model.get_input_embeddings().weight.shape[0])
        self.epoch = 0
        self.sink = HfSink(self, self._model, paused)
        self.adapters = Adapters(self._model, options["max_adapters"], users)

    def start(self, chunk: Chunk) -> None:
        """Pin the version that the batch's tokens come from, and prefill."""
        self._prefill(chunk, Decoder(self._model, self._head))

    def again(self, chunk: Chunk) -> None:
        """After a freeze: cut segments at a new version, and prefill anew when the caches are no longer true."""
        decoder, epoch = self._decoders[id(chunk)]
        if epoch != self.epoch:
            self._prefill(chunk, decoder)

    def step(self, chunk: Chunk) -> None:
        """Draw one token for each row."""
        with self._lock:
            self.sink.guard()
            self.adapters.activate(chunk.adapter)
            self._decoders[id(chunk)][0].step()

    def stop(self, chunk: Chunk) -> None:
        """Free the batch's caches."""
        self._decoders.pop(id(chunk), None)

    def changed(self, change: Callable[[Adapters], None]) -> None:
        """Change the adapters between two decode steps."""
        with self._lock:
            change(self.adapters)

    def sleep(self) -> None:
        """Drop caches and, on a GPU, move the weights to the host."""
        self.epoch += 1
        for decoder, _ in self._decoders.values():
            decoder.drop()
        self._move("cpu")

    def wake(self) -> None:
        """Undo `sleep`."""
        self._move(self._device)

    def free(self) -> None:
        """Let go of the model and of all that holds on to it; nothing else may be called afterwards."""
        self._decoders.clear()
        del self._model, self._head, self.sink, self.adapters
        gc.collect()
        if self._device != "cpu":
            torch.cuda.empty_cache()

    def _move(self, device: str) -> None:
        if self._device == "cpu":
            return
        with self._lock, torch.no_grad():
            self.sink.unshare(copy=False)
            for tensor in [*self._model.parameters(), *self._model.buffers()]:
                tensor.data = tensor.data.to(device)
        torch.cuda.empty_cache()

    def _prefill(self, chunk: Chunk, decoder: Decoder) -> None:
        with self._lock:
            self.sink.guard()
            version = self.sink.answering(chunk.adapter)
            for row in chunk.rows:
                row.label(version)
            self.adapters.activate(chunk.adapter)
            self._decoders[id(chunk)] = (decoder, self.epoch)
            decoder.prefill(chunk.rows)
