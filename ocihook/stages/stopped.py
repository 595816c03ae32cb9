"""A dump of a container that is being stopped: no engine makes an archive of it, so the store gets everything.

Whoever stops it (runtime/stop.py) has CRIU write into a directory below the store that is made for this.
"""

import dataclasses
import json
from pathlib import Path

from ocihook.checkpoints.belongings import FACTS_NAME, Belongings, stopping_place
from ocihook.errors import IdentificationError
from ocihook.images.image_set import list_other_images
from ocihook.session.participant import Dump
from ocihook.store.stored_manifest import BELONGINGS_NAME


def is_stopped(dump: Dump) -> bool:
    """Return whether the container is being stopped."""
    return stopping_place(dump.store.root, dump.container.id, dump.directory) is not None


def want_store(dump: Dump) -> int:
    """Have everything go into the store, or the dump fail, whatever the policy is; return the bytes beside memory.

    Raises:
        UnsupportedError: if what the container has changed cannot be found out.
        OSError: if something of it cannot be read.
    """
    call = dump.call()
    policy = dataclasses.replace(call.policy, mode="store", on_pack_error="fail")
    dump.journal.note(dataclasses.replace(call, policy=policy))
    return sum(_belongings(dump).sizes())


def save_belongings(dump: Dump, place: Path, names: list[str]) -> None:
    """Write what the container has beside its memory to its place on the way into the store.

    Args:
        dump: of the container, whose tasks stand still.
        place: where to.
        names: of its page images.

    Raises:
        OcihookError: if something of it cannot be saved.
        OSError: from the file system, a full one included.
    """
    facts = (dump.directory / ".." / FACTS_NAME).read_bytes()
    images = [image.name for image in list_other_images(dump.directory, packed_names=set(names))]
    with dump.journal.phase("save belongings") as phase:
        phase["bytes"] = _belongings(dump).save(place / BELONGINGS_NAME, dump.directory, images, facts, dump.progress)


def _belongings(dump: Dump) -> Belongings:
    bundle = Path(dump.container.bundle)
    config = Path(f"/proc/{dump.criu_pid}/root", str(bundle).lstrip("/"), "config.json")
    try:
        return Belongings.of(json.loads(config.read_text("utf-8", "replace")), bundle, dump.criu_pid)
    except (ValueError, AttributeError, TypeError) as error:
        raise IdentificationError(f"{bundle}/config.json cannot be read: {error!r}") from error
