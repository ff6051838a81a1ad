"""powertrain: pick the training engine, the inference engine and the weight transfer with one line of text.

Every public name is imported on first use, so that `import powertrain` costs less than importing pluggy. The names
and their modules stand once, in the stub `__init__.pyi`, where type checkers see them too.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"


def _homes() -> dict[str, str]:
    """Return public name -> module, from the stub's lines `from MODULE import NAME as NAME`."""
    with open(f"{__file__}i", encoding="utf-8") as stub:  # noqa: PTH123 - pathlib would be a third of the import
        lines = [line.split() for line in stub if line.startswith("from powertrain")]
    return {words[3]: words[1] for words in lines}


_HOME = _homes()
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        message = f"module 'powertrain' has no attribute {name!r}"
        raise AttributeError(message)
    from importlib import import_module

    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
