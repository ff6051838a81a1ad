"""LoRA adapters in the model through PEFT: several at once under versioned names, one active for a batch."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from powertrain.errors import ConfigError, StateError
from powertrain.options import nearest
from powertrain.tensors.lora import match, split_key, tensor_key

if TYPE_CHECKING:
    pass


class Adapters:
    """The adapters of one model. The caller holds the model's lock around every method that changes it.

    most: how many are kept; for a new one the oldest goes that `users()` does not name, and none when all are in use.
    Names of PEFT's own may hold no dots, so every adapter has a short one inside.
    """

    def __init__(self, model: Any, most: int, users: Callable[[], Iterable[str]]) -> None:
        self._model, self._most, self._users = model, most, users
        self._modules = [name for name, _ in model.named_modules() if name]
        self._tuner: Any = None
        self._inside: dict[str, str] = {}
        self._count = 0
        self._active: str | None = None

    def names(self) -> list[str]:
        """Return the registered names, oldest first."""
        return list(self._inside)

    def check(self, name: str) -> None:
        """Raise ConfigError for a name that is not registered: the base model never answers in its place."""
        if name not in self._inside:
            known = ", ".join(self._inside) or "none"
            message = f"no adapter {name!r} is loaded{nearest(name, self._inside)}; there is: {known}"
            raise ConfigError(message)

    def load(self, name: str, folder: str) -> None:
        """Register the PEFT adapter in `folder`."""
        from safetensors.torch import load_file

        place = Path(folder)
        missing = [f for f in ("adapter_config.json", "adapter_model.safetensors") if not (place / f).exists()]
        if missing:
            message = f"{folder} is no PEFT adapter: it lacks {' and '.join(missing)}"
            raise ConfigError(message)
        self.add(
            name,
            json.loads((place / "adapter_config.json").read_text()),
            load_file(place / "adapter_model.safetensors"),
        )

    def add(self, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        """Register a complete adapter; ConfigError for keys that match no module or are missing."""
        if name in self._inside:
            message = f"adapter {name!r} is loaded already; every version has a name of its own"
            raise StateError(message)
        modules = match(tensors, self._modules)
        full = {tensor_key(modules[key], split_key(key)[1]): value for key, value in tensors.items()}
        self._make_room()
        inside = f"a{self._count}"
        self._count += 1
        self._inject(inside, _lora_config(name, config))
        try:
            self._fill(name, inside, full)
        except BaseException:
            self._delete(inside)
            raise
        self._inside[name] = inside

    def drop(self, name: str) -> None:
        """Forget an adapter; StateError while a request in flight uses it."""
        self.check(name)
        if name in self._users():
            message = f"adapter {name!r} is in use by requests in flight; abort them or wait"
            raise StateError(message)
        self._delete(self._inside.pop(name))

    def activate(self, name: str | None) -> None:
        """Let the next forward use this adapter; None is the base model."""
        if self._tuner is None or (name is not None and self._inside[name] == self._active):
            return
        if name is None:
            if self._active is not None:
                self._tuner.base_model.disable_adapter_layers()
                self._active = None
            return
        self._tuner.base_model.enable_adapter_layers()
        self._tuner.base_model.set_adapter(self._inside[name], inference_mode=True)
        self._active = self._inside[name]

    def _make_room(self) -> None:
        used = set(self._users())
        for old in [name for name in self._inside if name not in used]:
            if len(self._inside) < self._most:
                return
            self._delete(self._inside.pop(old))

    def _inject(self, inside: str, config: Any) -> None:
        from peft import PeftModel

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that is going away
                # In the model's own dtype, as the trainer computes it: PEFT would else hold adapters in float32.
                if self._tuner is None:
                    self._tuner = PeftModel(self._model, config, adapter_name=inside, autocast_adapter_dtype=False)
                else:
                    self._tuner.add_adapter(inside, config, autocast_adapter_dtype=False)
        except ValueError as exc:
            if self._tuner is not None:
                self._tuner.peft_config.pop(inside, None)
            message = f"the adapter's target modules do not fit the model: {exc}"
            raise ConfigError(message) from exc
        finally:
            self._active = "?"  # PEFT has changed which one is active
            self._model.requires_grad_(False)

    def _fill(self, name: str, inside: str, full: Mapping[str, torch.Tensor]) -> None:
        from peft.utils import set_peft_model_state_dict

        if hasattr(self._model.get_output_embeddings(), "base_layer"):
            message = f"adapter {name!r} targets the output layer, which this engine computes by itself; leave it out"
            raise ConfigError(message)
        try:
            result = set_peft_model_state_dict(self._tuner, full, adapter_name=inside)
        except RuntimeError as exc:
            message = f"adapter {name!r} has tensors of another shape than the model's layers need: {exc}"
            raise ConfigError(message) from exc
        marker = f".{inside}."
        lacking = [key.replace(marker, ".") for key in result.missing_keys if marker in key]
        faults = [f"key {key.replace(marker, '.')} matches no module" for key in result.unexpected_keys]
        faults += [f"key {key} is missing" for key in lacking]
        if faults:
            message = f"adapter {name!r} does not fit the model: " + "; ".join(faults[:8])
            raise ConfigError(message)

    def _delete(self, inside: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns that the active one changes; `activate` sees to that
            self._tuner.delete_adapter(inside)
        self._active = "?"


def _lora_config(name: str, config: Mapping[str, Any]) -> Any:
    from peft import LoraConfig

    if config.get("modules_to_save"):
        message = f"adapter {name!r} carries whole modules (modules_to_save); send those as full weights"
        raise ConfigError(message)
    if str(config.get("peft_type", "LORA")).rpartition(".")[2] != "LORA":
        message = f"adapter {name!r} is of type {config['peft_type']}; this engine takes LORA"
        raise ConfigError(message)
    made = LoraConfig.from_peft_type(**{**config, "peft_type": "LORA"})
    made.inference_mode = True
    return made
