"""A checkpoint that could not be resumed: no retention removes it, and its user learns where it is."""

from pathlib import Path

import pytest

from ocihook.checkpoints.prune import Keep, prune
from ocihook.config import Settings
from ocihook.model import ContainerRef
from ocihook.runtime import attempts
from ocihook.session import history
from ocihook.store.store import Store
from ocihook.store.thin import Thin
from tests.unit.test_stored_belongings import stop

CONTAINER = ContainerRef(id="c" * 64, name="job", engine="podman", runtime="runc")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(store_dir=str(tmp_path / "store"), history_dir=str(tmp_path / "history"), workers=1)


@pytest.fixture
def thin(tmp_path: Path, settings: Settings) -> Thin:
    (tmp_path / "upper").mkdir()
    domain, manifest = stop(Store.of(settings), tmp_path / "images", tmp_path / "upper", CONTAINER)
    (Path(settings.store_dir) / "restoring").mkdir()
    return Thin(domain.name, manifest.id)


def is_kept(settings: Settings, thin: Thin, directory: Path) -> bool:
    """Return whether a prune that keeps the newest leaves a checkpoint, once there is a newer one."""
    stop(Store.of(settings), directory, directory.parent / "upper", CONTAINER)
    prune(Store.of(settings), Keep(last=1))
    return thin.checkpoint_id in Store.of(settings).open(thin.domain).checkpoint_ids()


def test_it_stays_from_the_first_attempt_on(tmp_path: Path, settings: Settings, thin: Thin) -> None:
    attempts.count_attempt(thin, settings)
    assert is_kept(settings, thin, tmp_path / "newer")


def test_one_that_was_resumed_goes_as_all_do(tmp_path: Path, settings: Settings, thin: Thin) -> None:
    attempts.count_attempt(thin, settings)
    attempts.release(thin, settings)
    assert not attempts.attempts_path(settings, thin).exists()
    assert not is_kept(settings, thin, tmp_path / "newer")


def test_the_pin_of_a_user_is_the_user_s(tmp_path: Path, settings: Settings, thin: Thin) -> None:
    Store.of(settings).open(thin.domain).pin(thin.checkpoint_id)
    attempts.count_attempt(thin, settings)
    attempts.release(thin, settings)
    assert is_kept(settings, thin, tmp_path / "newer")


def test_its_user_learns_where_it_is(settings: Settings, thin: Thin) -> None:
    said = attempts.keep(thin, settings, CONTAINER, "CRIU has failed", 1.0)
    assert said.startswith(f"Checkpoint {thin.checkpoint_id} is pinned: see the runbook")
    (record,) = history.read(Path(settings.history_dir))
    assert history.act_of(record) == "resume"
    assert history.error_of(record) == ("restore", "CRIU has failed")
    assert record["facts"]["checkpoint"] == thin.checkpoint_id
    assert history.find([record], "job") == record
    elsewhere = attempts.keep(Thin(thin.domain, "20261123T120000Z-0123abcd"), settings, CONTAINER, "away", 1.0)
    assert "is not in this node's store" in elsewhere
