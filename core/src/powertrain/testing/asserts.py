"""Lets pytest explain a failing `assert` of the suites; imported before them."""

from __future__ import annotations

from typing import Final

import pytest

SUITES: Final = ("engines", "infer", "keeping", "launcher", "pausing", "sink", "source", "suite", "train", "transfer")
"""The modules that hold tests, and what those are written in."""

pytest.register_assert_rewrite(*(f"powertrain.testing.{name}" for name in SUITES))
