"""What the sessions of a node left on record, for assertions."""

import json
from typing import Any

from integration.namespace import Namespace, wait_for


def sessions(namespace: Namespace) -> list[dict[str, Any]]:
    """Return the records of all ended dumps and restores, oldest first, once no session is open any more."""
    open_sessions = namespace.path("/run/ocihook/sessions")
    wait_for("all sessions to end", lambda: not list(open_sessions.glob("*.json")))
    paths = sorted(namespace.path("/var/lib/ocihook/history").glob("*.json"))
    records = [json.loads(path.read_text()) for path in paths]
    return [record for record in records if record.get("act") != "store"]


def last_session(namespace: Namespace, stage: str) -> dict[str, Any]:
    """Return the newest session that handled `stage`."""
    return [session for session in sessions(namespace) if stage in session["stages"]][-1]
