"""From a model's name to a folder in HF format, and from the folder to a transformers model.

Three forms are understood: a folder, `package:NAME/FILE.gguf` (a file that an installed package ships, converted once
into a cache), and a hub id. The cache lies in $POWERTRAIN_CACHE, else below $XDG_CACHE_HOME, else ~/.cache; entries are
named by the content they were made from, appear whole by a rename, and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from powertrain.errors import ConfigError

PACKAGE: Final = "package:"
_FORMAT: Final = 1  # part of the cache key; raised when the conversion changes
_PATTERNS: Final = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def cache_folder() -> Path:
    """Return where converted models are kept (not created)."""
    if given := os.environ.get("POWERTRAIN_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "powertrain"


def materialize(model: str, cache: str | os.PathLike[str] | None = None) -> str:
    """Return a folder in HF format for `model`; downloads or converts at most once, safe in concurrent processes.

    ConfigError, with the way out, for a folder without config.json, a package or file that is not there, and a hub id
    that cannot be fetched.
    """
    if model.startswith(PACKAGE):
        return str(_from_package(model, Path(cache) if cache is not None else cache_folder()))
    folder = Path(model).expanduser()
    if os.path.isdir(folder):  # noqa: PTH112 - Path's raises for a name that is too long
        if not (folder / "config.json").is_file():
            message = f"model folder {model!r} has no config.json; it must be in Hugging Face format"
            raise ConfigError(message)
        return str(folder)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        message = f"model folder {model!r} does not exist"
        raise ConfigError(message)
    return _from_hub(model)


def _from_hub(model: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, allow_patterns=_PATTERNS))
    except Exception as exc:
        message = (
            f"model {model!r} is no folder and cannot be fetched from the hub ({type(exc).__name__}: {exc}); "
            "give a folder, a hub id that is in the local hub cache, or package:NAME/FILE.gguf"
        )
        raise ConfigError(message) from exc


def _from_package(model: str, cache: Path) -> Path:
    from importlib.util import find_spec

    name, _, file = model.removeprefix(PACKAGE).partition("/")
    if not name or not file.endswith(".gguf"):
        message = f"model {model!r} is not of the form package:NAME/FILE.gguf"
        raise ConfigError(message)
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        message = f"model {model!r}: package {name!r} is not installed; install {name.replace('_', '-')}"
        raise ConfigError(message)
    folder = Path(spec.submodule_search_locations[0])
    source = folder / file
    if not source.is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*.gguf"))) or "none"
        message = f"model {model!r}: package {name!r} has no file {file!r}; its GGUF files: {found}"
        raise ConfigError(message)
    return _converted(source, cache)


def _converted(source: Path, cache: Path) -> Path:
    with source.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    target = cache / "models" / f"{source.stem}-{digest}-v{_FORMAT}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        convert_gguf(source, part)
        part.chmod(0o755)  # mkdtemp's is private
        try:
            part.rename(target)
        except OSError:
            if not target.is_dir():  # another process was faster is fine, anything else is not
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


@contextmanager
def quietly() -> Iterator[None]:
    """Keep transformers' progress bars off, which write to stderr and leave a monitor thread behind."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def convert_gguf(source: Path, target: Path) -> None:
    """Write a GGUF file as a float32 HF folder: safetensors, config, and the tokenizer with its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        where, file = str(source.parent), source.name
        model = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
    except ImportError as exc:
        message = f"reading {source.name} needs the package gguf: {exc}"
        raise ConfigError(message) from exc
    # The weights are plain float32 by now, but transformers still takes the model for a quantised one.
    model.is_quantized = False
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer"), (model, "quantization_method")):
        if hasattr(owner, name):
            delattr(owner, name)
    with quietly():
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def load_causal_lm(folder: str, *, dtype: str = "float32", device: str = "cpu", attention: str = "sdpa") -> Any:
    """Load a causal LM in eval mode from an HF folder; float32 values arrive bit for bit.

    dtype: torch's name. attention: transformers' attn_implementation. ConfigError when the folder cannot be loaded so.
    """
    import torch
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        message = f"dtype {dtype!r} is not a floating-point dtype of torch"
        raise ConfigError(message)
    try:
        with quietly():
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=kind, attn_implementation=attention, local_files_only=True
            )
    except (OSError, ValueError, ImportError, KeyError) as exc:
        message = f"model folder {folder!r} cannot be loaded with dtype {dtype} and attention {attention!r}: {exc}"
        raise ConfigError(message) from exc
    return model.to(device).eval()
