"""Ended sessions: the most recent records, and the totals of all, which outlive them, the agent and a reboot.

One JSON file a session, with names that sort by when they ended, and `totals`. A process that adds holds the lock.
"""

import contextlib
import fcntl
import json
import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ocihook.errors import StoreError
from ocihook.linux.files import replace_file, try_lock
from ocihook.linux.patience import Patience

# Upper bounds in seconds of the totals' buckets: from a lock to the copy of a node full of GPU memory.
_LOCK_TIMEOUT_S = 60.0
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
_TOTALS_NAME = "totals"
_VERSION = 1


def act_of(record: Mapping[str, Any]) -> str:
    """Return what a session did: dump, restore, or store (a checkpoint completed in the store after its dump)."""
    if "act" in record:
        return str(record["act"])
    return "dump" if any(stage.endswith("-dump") for stage in record["stages"]) else "restore"


def outcome_of(record: Mapping[str, Any]) -> str:
    """Return the outcome of a session.

    Returns:
        done; degraded: done, but not as it was wanted; refused: before anything was touched; failed; running.
    """
    stages: Mapping[str, Any] = record["stages"]
    vetoed = [stage for stage, entry in stages.items() if entry.get("status")]
    if vetoed:
        return "refused" if vetoed[0] in {"pre-dump", "pre-restore"} else "failed"
    if record.get("outcome"):
        return str(record["outcome"])
    last = {"dump": "post-dump", "restore": "post-resume"}.get(act_of(record))
    if last is None or "status" in stages.get(last, {}):
        return "done"
    return "failed" if "ended" in record else "running"


def error_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """Return the code and the text of what went wrong, ("", "") if nothing did."""
    if outcome_of(record) in {"done", "running"}:
        return "", ""
    failure = record["facts"].get("failure")
    if failure and not record.get("error"):
        return str(failure["name"]), f"{failure['what']}. {failure['remedy']}"
    act = act_of(record)
    text = record.get("error") or f"CRIU ended before the {act} was complete; the runtime's log of CRIU says why"
    return str(record.get("error_code") or "criu"), str(text)


def keep(directory: Path, session_id: str, record: Mapping[str, Any], *, limit: int) -> None:
    """Add a session's record, the same only once, and remove the oldest beyond `limit`.

    Raises:
        OSError: from the file system.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    ended = float(record["ended"])
    milliseconds = int(ended * 1000) % 1000
    when = time.strftime("%Y%m%dT%H%M%S", time.gmtime(ended))
    path = directory / f"{when}.{milliseconds:03}Z-{session_id}.json"
    with _locked(directory):
        if not path.exists():
            whole = {"id": session_id, **record}
            replace_file(path, json.dumps(whole, indent=1).encode(), mode=0o600)
            total = totals(directory)
            _add(total, whole)
            replace_file(directory / _TOTALS_NAME, json.dumps(total).encode(), mode=0o600)
        for old in sorted(directory.glob("*.json"))[:-limit]:
            old.unlink(missing_ok=True)


def read(directory: Path) -> list[dict[str, Any]]:
    """Return the records that are kept, the oldest first; a damaged one is left out.

    Raises:
        PermissionError: for users other than root, who would take an unreadable history for an empty one.
    """
    found = []
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".json"))
    except FileNotFoundError:  # no session has ended yet
        return []
    for path in (directory / name for name in names):
        with contextlib.suppress(OSError, ValueError):  # pruned meanwhile, or damaged
            record = json.loads(path.read_bytes())
            if isinstance(record, dict) and {"id", "began", "ended", "stages", "phases", "facts"} <= record.keys():
                found.append(record)
    return found


def totals(directory: Path) -> dict[str, Any]:
    """Return the totals of all sessions that ended on this node: by act, and within it by outcome, cause and phase."""
    try:
        found = json.loads((directory / _TOTALS_NAME).read_bytes())
        if isinstance(found, dict) and found.get("version") == _VERSION:
            return found
    except (FileNotFoundError, ValueError):
        pass
    return {"version": _VERSION, "acts": {}}


def find(records: list[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """Return a session by its id, by the id of its checkpoint or by its container; without a name the newest.

    For a checkpoint that is its dump; for a container, its newest session.

    Raises:
        StoreError: if there is no such session.
    """
    sessions = [record for record in records if act_of(record) != "store"]
    if name is None and sessions:
        return sessions[-1]
    by_id = [record for record in records if record["id"] == name]
    of_checkpoint = [record for record in sessions if name and record["facts"].get("checkpoint") == name]
    dumps = [record for record in of_checkpoint if act_of(record) == "dump"]
    of_container = [record for record in sessions if name and _is_called(record.get("container"), name)]
    for found in (by_id, dumps, of_checkpoint, of_container):
        if found:
            return found[-1]
    what = f"no session, checkpoint or container {name!r}" if name else "no session"
    raise StoreError(f"the history has {what}", hint="`ocihook ps --all` shows what it has")


def _is_called(container: Mapping[str, str] | None, name: str) -> bool:
    if not container:
        return False
    pod = f"{container.get('pod_namespace', '')}/{container.get('pod_name', '')}/{container.get('name', '')}"
    return name in {container.get("name"), pod} or (len(name) >= 12 and container["id"].startswith(name))


def _add(total: dict[str, Any], record: Mapping[str, Any]) -> None:
    act = total["acts"].setdefault(act_of(record), {"outcomes": {}, "causes": {}, "phases": {}, "bytes": {}})
    outcome = outcome_of(record)
    entry = act["outcomes"].setdefault(outcome, {"count": 0, "last": 0.0})
    entry["count"] += 1
    entry["last"] = max(entry["last"], float(record["ended"]))
    code, _ = error_of(record)
    if code:
        act["causes"][code] = act["causes"].get(code, 0) + 1
    facts = record["facts"]
    for kind in ("raw", "stored"):
        act["bytes"][kind] = act["bytes"].get(kind, 0) + int(facts.get(f"{kind}_bytes", 0))
    statistics = facts.get("criu_statistics", {})
    whole = {"name": "all", "seconds": record["ended"] - record["began"], "bytes": 0}
    criu = [{"name": f"criu {name}", "seconds": us / 1e6, "bytes": 0} for name, us in statistics.items()]
    for phase in (*record["phases"], *criu, whole):
        _add_phase(act["phases"], phase)


def _add_phase(phases: dict[str, Any], phase: Mapping[str, Any]) -> None:
    empty = {"seconds": 0.0, "bytes": 0, "buckets": [0] * (len(BUCKETS_S) + 1)}
    total = phases.setdefault(phase["name"], empty)
    total["seconds"] += max(0.0, phase["seconds"])
    total["bytes"] += int(phase["bytes"])
    total["buckets"][bisect_left(BUCKETS_S, phase["seconds"])] += 1


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        if not Patience(timeout_s=_LOCK_TIMEOUT_S).until(partial(try_lock, fd, fcntl.LOCK_EX)):
            raise TimeoutError(f"the history in {directory} is in use by another process")
        yield
    finally:
        os.close(fd)
