"""The suites find what is broken: of each engine with one broken method, the expected tests fail, and no other."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from nested import finished, start

HERE = Path(__file__).parent
FILES = ("broken_infer.py", "broken_train.py", "broken_moving.py")
SECONDS = 600.0


def broken(file):
    """Yield (class, tests that must fail) as the file says, without importing it."""
    for node in ast.parse((HERE / file).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield (
                node.name,
                next(
                    ast.literal_eval(part.value)
                    for part in node.body
                    if isinstance(part, ast.Assign) and part.targets[0].id == "fails"
                ),
            )


CASES = [pytest.param(file, *case, id=f"{file[7:-3]}-{case[0]}") for file in FILES for case in broken(file)]


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A function: file -> what its tests came to. All files run at once, each in a process of its own."""
    folder = tmp_path_factory.mktemp("reports")
    running = {file: start(HERE / file, folder / f"{file}.json") for file in FILES}
    made = {}

    def get(file):
        if file not in made:
            made[file] = finished(running[file], folder / f"{file}.json", SECONDS)
        return made[file]

    yield get
    for process in running.values():
        process.kill()


def test_there_are_enough_broken_engines():
    assert len(CASES) >= 16


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("file", "owner", "expected"), CASES)
def test_exactly_the_expected_tests_fail(record, file, owner, expected):
    recorder = record(file)
    reasons = {test: recorder.reasons[owner][test][-800:] for test in recorder.failed(owner) - set(expected)}
    assert recorder.failed(owner) == set(expected), reasons or recorder.text[-2000:]
    assert len(recorder.outcomes[owner]) > 20
