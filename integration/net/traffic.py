"""What the peers say of their traffic."""

import re
from collections.abc import Callable, Mapping

from integration.namespace import wait_for

CONNECTIONS = 4
_ENOUGH_BYTES = 50_000
_PROGRESS = re.compile(r"^connection (\d+) sent (\d+) received (\d+)$", re.MULTILINE)
_BROKEN = re.compile(r"^(?:broken|failed).*$", re.MULTILINE)


def progress(said: str) -> dict[int, tuple[int, int]]:
    """Return how many bytes each connection has sent and received, by its key.

    Raises:
        AssertionError: if one has broken.
    """
    if found := _BROKEN.findall(said):
        raise AssertionError("; ".join(found))
    return {int(key): (int(sent), int(received)) for key, sent, received in _PROGRESS.findall(said)}


def assert_flows(
    peers: Mapping[str, Callable[[], str]], *, connections: int = CONNECTIONS, enough_bytes: int = _ENOUGH_BYTES
) -> None:
    """Check that all connections of all peers continue in both directions.

    Args:
        peers: what returns all that one has said since it was started or restored.
        connections: of each.
        enough_bytes: of each in both directions, to be seen from now on.
    """
    for name, said in peers.items():
        wait_for(f"connections of {name}", lambda said=said: len(progress(said())) == connections)  # type: ignore[misc]
    before = {name: progress(said()) for name, said in peers.items()}

    def goes_on(name: str) -> bool:
        now = progress(peers[name]())
        return all(now[key][way] > done[way] + enough_bytes for key, done in before[name].items() for way in (0, 1))

    for name in peers:
        wait_for(f"traffic of {name}", lambda name=name: goes_on(name))  # type: ignore[misc]
