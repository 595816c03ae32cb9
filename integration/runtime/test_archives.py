"""Containers that an engine's own checkpoint has written into an archive, made again by the handler."""

import json

import pytest

from integration.namespace import CommandError
from integration.runtime.conftest import MakeHandled
from integration.runtime.engine import HandledPodman

ARCHIVES = "/var/lib/ocihook/archives"


def checkpoint(podman: HandledPodman, name: str, *options: str, compression: str = "none") -> int:
    """Checkpoint a container into an archive where archives are looked for, and remove it; return its last count."""
    directory = podman.namespace.path(ARCHIVES)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = len(list(directory.iterdir()))
    podman("container", "checkpoint", "--compress", compression, "--export", f"{ARCHIVES}/{number}.tar", *options, name)
    last = podman.counts(name)[-1]
    podman("rm", "--force", name)
    return last


def ids(podman: HandledPodman) -> list[str]:
    """Return the ids of the checkpoints in all archives."""
    listed = json.loads(podman.ocihook("archive", "list", "--json", ARCHIVES))
    return [row["checkpoint"] for row in listed["archives"]]


@pytest.mark.parametrize(("runtime", "mode"), [("runc", "inline"), ("crun", "store")])
def test_an_engine_s_archive_is_a_source(make_handled: MakeHandled, runtime: str, mode: str) -> None:
    podman = make_handled(runtime)
    podman.make("run", "job", "--volume", "/cache", mode=mode)
    podman.wait_to_count("job")
    podman.write("job", "/state/file", "kept")
    podman.write("job", "/cache/file", "kept, too")
    podman.write("job", "/dev/shm/file", "and this")
    checksum = podman.count("job")[1]
    last = checkpoint(podman, "job", compression="zstd" if mode == "inline" else "none")
    (first,) = ids(podman)

    podman.make("run", "job", "--volume", "/cache", restore_from="latest", on_restore_error="fail", mode=mode)
    podman.wait_to_count("job")
    assert podman.counts("job")[0] == last + 1
    assert podman.count("job")[1] == checksum
    for path, text in (("/state/file", "kept"), ("/cache/file", "kept, too"), ("/dev/shm/file", "and this")):
        assert podman.file("job", path) == text
    with pytest.raises(CommandError, match=r"runs already, as container job.*two must not resume"):
        podman.make("run", "twin", "--volume", "/cache", restore_from=first, on_restore_error="fail")
    podman("rm", "--force", "twin")

    last = checkpoint(podman, "job")  # of what was restored, and again: the newest counts
    podman.make("run", "job", "--volume", "/cache", restore_from="latest", on_restore_error="fail")
    podman.wait_to_count("job")
    assert podman.counts("job")[0] == last + 1
    assert podman.file("job", "/cache/file") == "kept, too"
    podman.remove("job")
    with pytest.raises(CommandError, match="mounts that are missing: /cache"):
        podman.make("run", "job", restore_from=first, on_restore_error="fail")
    podman("rm", "--force", "job")
    with pytest.raises(CommandError, match="must be the id of a checkpoint"):
        podman.make("run", "job", restore_from=f"{ARCHIVES}/0.tar")
