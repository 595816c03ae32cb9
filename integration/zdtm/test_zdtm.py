"""CRIU's own suite: a test that passes in a container with CRIU alone passes with ocihook, too."""

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.zdtm.bundle import make_template
from integration.zdtm.case import Case, find_cases
from integration.zdtm.node import Node, Outcome

CASES = (
    find_cases(Path(os.environ["OCIHOOK_ZDTM_ROOT"]) / "test/zdtm/static") if "OCIHOOK_ZDTM_ROOT" in os.environ else []
)
TRIES = 3  # some tests of the suite now and then fail with CRIU alone

pytestmark = pytest.mark.skipif(not CASES, reason="minutes: make zdtm")


class Rounds:
    """A node for each way in which a test is run."""

    def __init__(self, scratch: Path, root: Path, wheels: Path) -> None:
        make_template(scratch / "template", CASES)
        where = (root, scratch / "template")
        self._alone = Node(scratch / "alone", *where)
        self._inline = Node(scratch / "inline", *where, wheels=wheels, mode="inline")
        self._store = Node(scratch / "store", *where, wheels=wheels, mode="store")

    def close(self) -> None:
        for node in (self._alone, self._inline, self._store):
            node.close()

    def differences(self, case: Case) -> dict[str, Outcome]:
        """Return the ways in which a test is never as good as with CRIU alone; warn of those in which it is once."""
        alone = self._alone.run(case)
        if alone.failed:
            pytest.skip(f"fails with CRIU alone: {alone.failed}")
        found = {
            "inline": self._difference(case, alone, self._inline),
            "store": self._difference(case, alone, self._store),
            "left running": self._difference(case, alone, self._inline, leaves=True),
        }
        return {way: outcome for way, outcome in found.items() if outcome is not None}

    def _difference(self, case: Case, alone: Outcome, node: Node, *, leaves: bool = False) -> Outcome | None:
        """Return the last outcome if no try is as good as the one with CRIU alone before it."""
        worse: list[Outcome] = []
        while not (outcome := node.run(case, leaves=leaves)).is_as_good_as(alone):
            worse.append(outcome)
            if len(worse) == TRIES:
                return outcome
            alone = self._alone.run(case, leaves=leaves)
            if alone.failed:
                _report(case, node, worse, f"then fails with CRIU alone: {alone.failed}", leaves=leaves)
                return None
        if worse:
            _report(case, node, worse, "then is as with CRIU alone", leaves=leaves)
        return None


class Retried(UserWarning):
    """A test differs from CRIU alone in some tries, and not in all: pytest lists these warnings at its end."""


def _report(case: Case, node: Node, worse: list[Outcome], end: str, *, leaves: bool) -> None:
    way = "left running" if leaves else node.mode
    found = "; ".join(outcome.failed or str(outcome.notes) for outcome in worse)
    warnings.warn(
        f"{case.name}, {way}: differs in {len(worse)} of {TRIES} tries, {end}: {found}", Retried, stacklevel=1
    )


@pytest.fixture(scope="module")
def rounds(forky_root: Path, wheels: Path) -> Iterator[Rounds]:
    directory = Path(tempfile.mkdtemp(prefix="ocihook-zdtm-", dir="/var/tmp"))
    made = Rounds(directory, forky_root, wheels)
    yield made
    made.close()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_with_criu_alone(rounds: Rounds, case: Case) -> None:
    if case.unusable:
        pytest.skip(case.unusable)
    assert rounds.differences(case) == {}
