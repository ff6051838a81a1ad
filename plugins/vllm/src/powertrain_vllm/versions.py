"""Which vLLM this plugin works with, and what differs between its versions."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Final

from packaging.version import Version

from powertrain.errors import ConfigError

FIRST: Final = Version("0.23")
BELOW: Final = Version("0.33")
TESTED: Final = "0.32.0 (CPU)"


@dataclass(frozen=True, slots=True)
class Generation:
    """What a version has. head_dtype: the model config's option for a float32 LM head (from 0.26)."""

    head_dtype: bool


def imported() -> Any:
    """Import vLLM and return it; ConfigError where it is not there or is broken, with the interpreter and the cause."""
    try:
        import vllm
    except ModuleNotFoundError as exc:
        if exc.name != "vllm":
            raise _broken(exc) from exc
        message = f"vllm is not installed for {sys.executable}; pip install 'powertrain-vllm[engine]', or set python="
        raise ConfigError(message) from exc
    except Exception as exc:
        raise _broken(exc) from exc
    return vllm


def _broken(exc: Exception) -> ConfigError:
    told = f"vllm is installed for {sys.executable} and cannot be imported: {type(exc).__name__}: {exc}"
    return ConfigError(f"{told}; install a build of it that fits this machine and this torch")


def generation(version: str, *, allow: bool = False) -> Generation:
    """Return what the installed version has; ConfigError outside the range that was tested, unless allowed."""
    found = Version(Version(version).base_version)
    if not FIRST <= found < BELOW and not allow:
        message = (
            f"vLLM {version} is installed; this plugin works with {FIRST} to below {BELOW}, tested with {TESTED}. "
            "Install one of those, or take it on yourself with untested_version=allow"
        )
        raise ConfigError(message)
    return Generation(head_dtype=found >= Version("0.26"))
