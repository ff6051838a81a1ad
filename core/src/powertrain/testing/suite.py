"""What all suites share: the plugin found by its name, capabilities that decide what runs, departures with a reason.

A stub is a subclass. It may set the names in its suite's `OPEN` and add tests of its own. A test that it overrides or
deletes without a stated reason fails `test_every_test_is_there`; so does everything else that it takes from a suite.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar

import pytest

from powertrain.registry import Registry
from powertrain.specs import Support

if TYPE_CHECKING:
    from powertrain.specs import Spec

Test = TypeVar("Test", bound=Callable[..., Any])
RUNS: Final = (Support.FULL, Support.PARTIAL)


class DepartureWarning(UserWarning):
    """Tells, in pytest's closing summary, that a plugin departs from a test of its suite, and why."""


def needs(*capabilities: str) -> Callable[[Test], Test]:
    """Let a test run only where the plugin's spec says full or partial for each capability (decorator)."""

    def mark(test: Test) -> Test:
        test.__dict__["needs"] = capabilities
        return test

    return mark


def departs(*, reason: str, xfail: bool = False) -> Callable[[Test], Test]:
    """Mark an override of a suite's test as a departure, with its reason (decorator), which pytest then prints.

    xfail: the body is the suite's test and must fail (`strict`), so that the departure ends when the fault does; else
    the body stands in the test's place. A test whose capability the spec calls full cannot be departed from: the
    spec then promises too much, and says partial instead.
    """

    def mark(test: Test) -> Test:
        test.__dict__["departure"] = reason
        return pytest.mark.xfail(strict=True, reason=reason)(test) if xfail else test

    return mark


@functools.cache
def plugin_spec(kind: str, name: str) -> Spec:
    """Return what the registry knows under a plugin's name; its errors say what is missing."""
    return Registry().get(kind, name)


class Suite:
    """Base of the suites. KIND: which kind of plugin. NAMED_BY: the attribute that holds the plugin's name."""

    KIND: ClassVar[str]
    NAMED_BY: ClassVar[str]
    OPEN: ClassVar[frozenset[str]] = frozenset({"patience"})
    """Names that a stub may set or override; every suite adds its own."""
    patience: ClassVar[float] = 60.0
    """Seconds that any call may take; one that takes longer fails its test there and then."""

    @classmethod
    def spec(cls) -> Any:
        """Return the plugin's spec, as the registry finds it."""
        return plugin_spec(cls.KIND, getattr(cls, cls.NAMED_BY))

    @classmethod
    def support(cls, capability: str) -> Support:
        """Return what the spec says of a capability; UNKNOWN where it says nothing."""
        return getattr(cls.spec(), "capabilities", {}).get(capability, Support.UNKNOWN)  # type: ignore[no-any-return]

    @pytest.fixture(autouse=True)
    def _only_what_is_promised(self, request: pytest.FixtureRequest) -> None:
        cls, name = type(self), request.function.__name__
        if cls.test_every_test_is_there is not Suite.test_every_test_is_there:
            pytest.fail(f"{cls.__name__} overrides test_every_test_is_there, which no stub may do")
        reason = getattr(request.function, "departure", "")
        if reason:
            told = f"{cls.__name__}.{name} departs from its suite: {reason}"
            warnings.warn_explicit(told, DepartureWarning, request.node.path.name, 1, module=cls.__module__)
        for capability in _needed(cls, name):
            if self.support(capability) not in RUNS:
                pytest.skip(f"capability {capability} is {self.support(capability).value}")

    def test_every_test_is_there(self) -> None:
        """A stub has taken a test away, or changed what a suite rests on, without saying why.

        Decorate the override with `@departs(reason="...")`. What is not a test and not in the suite's `OPEN` cannot
        be overridden at all.
        """
        problems = list(unexplained(type(self)))
        assert not problems, "\n".join(problems)


def suites_of(cls: type) -> list[type]:
    """Return the suites among a class's bases, nearest first."""
    return [base for base in cls.__mro__ if base.__module__.startswith("powertrain.testing.")]


def _needed(cls: type, name: str) -> tuple[str, ...]:
    """Return the capabilities that the suite's own test of that name needs, whoever has overridden it."""
    found = next((vars(suite)[name] for suite in suites_of(cls) if name in vars(suite)), None)
    return getattr(found, "needs", ())


def unexplained(cls: type[Suite]) -> Iterator[str]:
    """Yield one sentence for each member of a suite that a stub has overridden without the right to."""
    suites = suites_of(cls)
    members = {name for suite in suites for name in vars(suite) if not name.startswith("__")}
    for name in sorted(members - cls.OPEN):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        if owner in suites:
            continue
        found = vars(owner)[name]
        reason = getattr(found, "departure", None)
        full = [one for one in _needed(cls, name) if cls.support(one) is Support.FULL]
        if not name.startswith("test_"):
            yield f"{owner.__name__} overrides {name}, which a stub cannot; it may set {', '.join(sorted(cls.OPEN))}"
        elif not callable(found):
            yield f"{owner.__name__} takes {name} away; keep it, or override it with @departs(reason=...)"
        elif not isinstance(reason, str) or not reason.strip():
            yield f"{owner.__name__} overrides {name} without a reason; use @departs(reason=...)"
        elif full:
            yield f"{owner.__name__} departs from {name}; its spec calls {', '.join(full)} full: say partial there"
