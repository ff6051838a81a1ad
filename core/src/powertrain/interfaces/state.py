"""What may be called when: a small state machine that engine base classes declare and subclasses inherit.

A subclass writes plain methods; each method named in the base class's `RULES` is wrapped when the subclass is
defined, so that a call in a wrong state raises `StateError` naming the state, the method and what is allowed.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

from powertrain.errors import StateError

_running: ContextVar[frozenset[tuple[int, str]]] = ContextVar("powertrain_running_methods", default=frozenset())


@dataclass(frozen=True, slots=True)
class Rule:
    """One method's place in the state machine.

    allowed: states in which it may be called. after: the state when it has returned (None: unchanged).
    failed: the state when it has raised (None: unchanged).
    """

    allowed: tuple[str, ...]
    after: str | None = None
    failed: str | None = None


class Stateful:
    """Base of the engine interfaces; holds `state` and enforces `RULES`."""

    RULES: ClassVar[Mapping[str, Rule]] = {}
    state: str = "new"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, rule in cls.RULES.items():
            method = cls.__dict__.get(name)
            if method is not None and not getattr(method, "__isabstractmethod__", False):
                setattr(cls, name, _guarded(name, method, rule))

    def health(self) -> Mapping[str, Any]:
        """Return plain facts for monitoring (state, version, requests in flight); from any thread, must not block."""
        return {"state": self.state}

    @contextmanager
    def _entered(self, name: str, rule: Rule) -> Iterator[None]:
        key = (id(self), name)
        active = _running.get()
        if key in active:  # a subclass calling super(): the outermost call has checked already
            yield
            return
        if self.state not in rule.allowed:
            message = (
                f"{type(self).__name__}.{name}() was called in state {self.state!r}; "
                f"it is allowed in: {', '.join(rule.allowed)}"
            )
            raise StateError(message)
        token = _running.set(active | {key})
        try:
            yield
        except BaseException:
            self.state = rule.failed or self.state
            raise
        finally:
            _running.reset(token)
        self.state = rule.after or self.state


def _guarded(name: str, method: Callable[..., Any], rule: Rule) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call_async(self: Stateful, *args: Any, **kwargs: Any) -> Any:
            with self._entered(name, rule):
                return await method(self, *args, **kwargs)

        return call_async

    @functools.wraps(method)
    def call(self: Stateful, *args: Any, **kwargs: Any) -> Any:
        with self._entered(name, rule):
            return method(self, *args, **kwargs)

    return call
