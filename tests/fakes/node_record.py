"""A node with a history and a store in which everything has happened once, for what reports them."""

from pathlib import Path
from typing import Any

from ocihook.checkpoints.complete import complete
from ocihook.checkpoints.pending import Failure, directory_of, write_failure
from ocihook.checkpoints.stage import choose_place, stage
from ocihook.config import Settings
from ocihook.images.image_set import list_packable
from ocihook.model import ContainerRef
from ocihook.session import history
from ocihook.store.domain import Domain
from ocihook.store.store import Store
from tests.fakes.images import make_image_set, mixed_pages

PAGES = 300
_STAGES = {"dump": ("pre-dump", "post-dump"), "restore": ("pre-restore", "post-resume"), "store": ()}


def record(act: str, outcome: str, ended: float) -> dict[str, Any]:
    """Return the record of a session that took 2 s and packed 4 MiB into 1 MiB."""
    done = {"status": 0, "message": "", "began": ended - 1, "seconds": 0.5}
    stages: dict[str, Any] = dict.fromkeys(_STAGES[act], done)
    if outcome == "refused":
        stages = {_STAGES[act][0]: {**done, "status": 1}}
    error = {} if outcome == "done" else {"error": "what happened", "error_code": "store-full", "outcome": outcome}
    return {
        "act": act,
        "began": ended - 2,
        "ended": ended,
        "container": None,
        "stages": stages,
        "phases": [{"name": "pack", "began": ended - 1, "seconds": 0.3, "bytes": 4 << 20}],
        "facts": {
            "raw_bytes": 4 << 20,
            "stored_bytes": 1 << 20,
            "criu_statistics": {"freezing": 1000, "frozen": 1500000, "memdump": 2000, "memwrite": 3000},
        },
        **error,
    }


def make_node(root: Path) -> Settings:
    """Make history and store: of a container a complete checkpoint, one that cannot be stored, a lost one."""
    settings = Settings(history_dir=str(root / "history"), store_dir=str(root / "store"), workers=1)
    ended = 1000.0
    for act, outcome in (("dump", "done"), ("dump", "refused"), ("dump", "degraded"), ("restore", "failed")):
        history.keep(root / "history", f"{int(ended)}-1", record(act, outcome, ended), limit=100)
        ended += 10
    taken = [_take(root) for _ in range(3)]
    domain = Domain.open(root / "store", "ml")
    assert complete(domain, taken[0], workers=1, settings=settings)
    write_failure(domain, taken[1], Failure("store-full", "no space left", "make room", attempts=2))
    (directory_of(domain, taken[2]) / "pages-1.img").unlink()
    domain.pin(taken[0])
    domain.pushes.note(taken[0])
    (waiting,) = domain.due_pushes()
    domain.pushes.failed(waiting, "no route to host", 1000.0)
    return settings


def _take(root: Path) -> str:
    images = root / "images"
    make_image_set(images, {1: mixed_pages(PAGES)})
    container = ContainerRef(id="ab" * 32, name="c", pod_name="p", pod_namespace="ml")
    store = Store(root / "store")
    place = choose_place(container, store)
    place.pending.mkdir()
    return stage(place, list_packable(images), container, images, store=store, host={}, durable=False).id
