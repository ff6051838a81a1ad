"""The records that may cross a process border. Only classes marked here are ever rebuilt from a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, dataclass_transform

from powertrain.options import option

WIRE_TYPES: Final[dict[str, type]] = {}
"""Class name -> dataclass; the control channel refuses every other name."""


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, option))
def record(*, kw_only: bool = True, order: bool = False) -> Callable[[type], Any]:
    """Make a class a frozen dataclass that the control channel carries (decorator). Names must be unique.

    A field whose type is a tuple may be given any sequence. `__post_init__` is called after that.
    """

    def make(cls: type) -> Any:
        tuples = [name for name, kind in cls.__annotations__.items() if str(kind).startswith("tuple[")]
        check = cls.__dict__.get("__post_init__")

        def post_init(self: Any) -> None:
            for name in tuples:
                object.__setattr__(self, name, tuple(getattr(self, name)))
            if check is not None:
                check(self)

        cls.__post_init__ = post_init  # type: ignore[attr-defined]
        made: type = dataclass(frozen=True, slots=True, kw_only=kw_only, order=order)(cls)
        assert WIRE_TYPES.get(made.__name__, made).__qualname__ == made.__qualname__, made
        WIRE_TYPES[made.__name__] = made
        return made

    return make
