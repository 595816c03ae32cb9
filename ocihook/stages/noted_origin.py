"""Notes beside CRIU's images what the container was made with, for a restore by the runtime handler."""

import json
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ocihook.belongings.filesystems import volumes_of
from ocihook.checkpoints.origin import ORIGIN_NAME, Origin, write_origin
from ocihook.container.spec import spec_facts
from ocihook.errors import OcihookError
from ocihook.session.participant import Dump, Participant
from ocihook.stages.stopped import is_stopped
from ocihook.store.domain import new_checkpoint_id

_PODMAN_VOLUME = re.compile(r"/volumes/([0-9a-f]{64})/_data/?$")

log = logging.getLogger(__name__)


class NotedOrigin(Participant):
    """Writes the note; the dump goes on without it if the container's bundle cannot be read."""

    def prepare(self, dump: Dump) -> None:
        """Remove that of an earlier dump into the same directory."""
        (dump.directory / ORIGIN_NAME).unlink(missing_ok=True)

    def after_images(self, dump: Dump) -> str:
        """Write it, once: where the stage starts over the manifest may have its checksum already.

        Of a container that is being stopped the store has more than that.
        """
        bundle = Path(dump.container.bundle)
        if dump.policy.mode == "off" or not dump.container.bundle or is_stopped(dump):
            return ""
        if (dump.directory / ORIGIN_NAME).exists():
            return ""
        try:
            seen = Path(f"/proc/{dump.criu_pid}/root")
            config = json.loads((seen / str(bundle).lstrip("/") / "config.json").read_text("utf-8", "replace"))
            write_origin(dump.directory, _origin(dump, config, bundle, seen))
        except (OcihookError, OSError, ValueError, AttributeError, TypeError) as error:
            log.warning("container %s: the runtime handler cannot restore its archive: %s", dump.container, error)
        return ""


def _origin(dump: Dump, config: Mapping[str, Any], bundle: Path, seen: Path) -> Origin:
    ending = {destination: _PODMAN_VOLUME.search(str(path)) for destination, path in volumes_of(config).items()}
    return Origin(
        id=new_checkpoint_id(),
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        container=dump.container,
        spec=spec_facts(config, bundle, seen),
        volumes={found[1]: destination for destination, found in ending.items() if found},
    )
