"""Weight versions: no number is handed out twice, also not after a resume."""

import pytest

from powertrain.errors import CheckpointError
from powertrain.weights import VersionCounter


def test_reopened_counter_repeats_nothing(tmp_path):
    first = VersionCounter(tmp_path / "versions")
    before = [first.next() for _ in range(3)]
    second = VersionCounter(tmp_path / "versions")
    after = [second.next() for _ in range(3)]
    assert [str(version) for version in before + after] == ["1.1", "1.2", "1.3", "2.4", "2.5", "2.6"]


def test_number_is_reserved_before_it_is_used(tmp_path):
    version = VersionCounter(tmp_path / "versions").next()
    assert (tmp_path / "versions").read_text() == f"{version}\n"


def test_damaged_file_is_named(tmp_path):
    (tmp_path / "versions").write_text("two\n")
    with pytest.raises(CheckpointError, match="'two' in place of a weight version"):
        VersionCounter(tmp_path / "versions")
