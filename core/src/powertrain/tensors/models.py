"""From a model's name to a folder in HF format, and from the folder to a transformers model.

Three forms are understood: a folder, `package:NAME/FILE.gguf` (a file that an installed package ships, converted once
into a cache), and a hub id. The cache lies in $POWERTRAIN_CACHE, else below $XDG_CACHE_HOME, else ~/.cache; entries are
named by the content they were made from, appear whole by a rename, and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Final

from powertrain.errors import ConfigError
from powertrain.options import nearest

PACKAGE: Final = "package:"
_HUB_ID: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_FORMS: Final = "give a folder, a hub id that is in the local hub cache, or package:NAME/FILE.gguf"
_FORMAT: Final = 1  # part of the cache key; raised when the conversion changes
_PATTERNS: Final = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def cache_folder() -> Path:
    """Return where converted models are kept (not created)."""
    if given := os.environ.get("POWERTRAIN_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "powertrain"


def locate(model: str, base: str | os.PathLike[str] = ".") -> Path | None:
    """Return the folder or GGUF file that `model` means, loading nothing; None for a hub id, which is not looked up.

    base: from where a relative folder is read. ConfigError, with the way out, as for `materialize`.
    """
    if model.startswith(PACKAGE):
        return _in_package(model)
    folder = Path(base, Path(model).expanduser())
    if model and os.path.isdir(folder):  # noqa: PTH112 - Path's raises for a name that is too long
        if not (folder / "config.json").is_file():
            message = f"model folder {model!r} has no config.json; it must be in Hugging Face format"
            raise ConfigError(message)
        return folder
    if model and os.path.lexists(folder):
        message = f"model {model!r} is a file; give a folder in Hugging Face format, or package:NAME/FILE.gguf"
        raise ConfigError(message)
    below = f"below {str(Path(base).absolute())!r}"
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        beside = os.listdir(folder.parent) if os.path.isdir(folder.parent) else []  # noqa: PTH112, PTH208 - as above
        where = "" if folder == Path(model).expanduser() else f" {below}"
        message = f"model folder {model!r} does not exist{where}{nearest(folder.name, beside)}"
        raise ConfigError(message)
    if not _HUB_ID.fullmatch(model):
        message = f"model {model!r} is no folder {below}, nor can it be a hub id; {_FORMS}"
        raise ConfigError(message)
    return None


def materialize(model: str, cache: str | os.PathLike[str] | None = None, *, base: str | os.PathLike[str] = ".") -> str:
    """Return a folder in HF format for `model`; downloads or converts at most once, safe in concurrent processes.

    base: as for `locate`. ConfigError, with the way out, for a folder without config.json, a package or file that is
    not there, and a hub id that cannot be fetched.
    """
    found = locate(model, base)
    if found is None:
        return _from_hub(model, Path(base).absolute())
    converted = model.startswith(PACKAGE)
    return str(_converted(found, Path(cache) if cache is not None else cache_folder()) if converted else found)


def _from_hub(model: str, base: Path) -> str:
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(model, allow_patterns=_PATTERNS))
    except Exception as exc:
        message = (
            f"model {model!r} is no folder below {str(base)!r} and cannot be fetched from the hub "
            f"({type(exc).__name__}: {exc}); {_FORMS}"
        )
        raise ConfigError(message) from exc


def _in_package(model: str) -> Path:
    """Return the path of a file that an installed package ships."""
    from importlib.util import find_spec

    name, _, file = model.removeprefix(PACKAGE).partition("/")
    spec = find_spec(name) if name.isidentifier() else None
    places = spec.submodule_search_locations if spec else None
    if name.isidentifier() and not places:
        hint = nearest(name, {module.name for module in iter_modules() if module.ispkg})
        message = f"model {model!r}: package {name!r} is not installed{hint or '; install ' + name.replace('_', '-')}"
        raise ConfigError(message)
    folder = Path(places[0]) if places else Path()
    found = f"its GGUF files: {', '.join(sorted(path.name for path in folder.glob('*.gguf'))) or 'none'}"
    if not places or not file.endswith(".gguf"):
        message = f"model {model!r} is not of the form package:NAME/FILE.gguf{'; ' + found if places else ''}"
        raise ConfigError(message)
    if not (folder / file).is_file():
        message = f"model {model!r}: package {name!r} has no file {file!r}; {found}"
        raise ConfigError(message)
    return folder / file


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
