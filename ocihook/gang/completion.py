"""A member's checkpoint became complete: its node says so to the coordinator, outside any attempt.

What is left running is packed, and what goes to the store is stored, when the attempt is decided already: no member
waits for that. So an epoch is complete once all members have been reported.
"""

import logging

from ocihook.errors import GangError, plain
from ocihook.gang.link import Link
from ocihook.linux.patience import Patience
from ocihook.model import ContainerRef

_RETRY_S = 0.5

log = logging.getLogger(__name__)


def report_complete(container: ContainerRef, link: Link, patience: Patience) -> bool:
    """Report the checkpoint of a container that was dumped with its gang; return whether the coordinator has answered.

    Args:
        container: as its dump has named it.
        link: to the coordinator.
        patience: how long to try: the attempt may not be decided yet.

    Raises:
        GivenUp: once its caller has given up.
    """
    name, epoch, attempt = container.gang.split("/")
    dump = {"namespace": container.pod_namespace, "gang": name, "epoch": int(epoch), "attempt": attempt}
    request = {"verb": "complete", **dump, "member": container.gang_member}
    while True:
        try:
            has_answered, reason = True, "it does not know of that"
            if link.ask(request, patience).get("is_known"):
                return True
        except (GangError, OSError) as error:
            has_answered, reason = False, plain(error)
        if patience.is_over:
            break
        patience.sleep(_RETRY_S)
    log.warning("container %s: its complete checkpoint is not reported, epoch %s: %s", container, epoch, reason)
    return has_answered
