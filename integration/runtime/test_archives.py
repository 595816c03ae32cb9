"""Containers that an engine's own checkpoint has written into an archive, made again by the handler."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.namespace import CommandError, wait_for
from integration.podman.engine import IMAGE
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


@contextlib.contextmanager
def another(scratch: Path, workload: Path) -> Iterator[tuple[HandledPodman, str]]:
    """Yield another podman, whose service listens, and its URL."""
    scratch.mkdir()
    other = HandledPodman(scratch, "runc", workload)
    services = []
    try:
        socket = scratch / "podman.sock"
        words = ["system", "service", "--time", "0", f"unix://{socket}"]
        services.append(other.namespace.spawn("podman", *other.options(), *words, log=scratch / "service.log"))
        wait_for("podman's service", socket.exists)
        yield other, f"unix://{socket}"
    finally:
        for service in services:
            service.terminate()
        other.close()


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


def test_a_container_is_run_from_here_and_from_another_node(
    make_handled: MakeHandled, scratch: Path, workload: Path
) -> None:
    here = make_handled("runc")
    here.use_by_default()
    here.ocihook("install", "--runtime", "--libexec", "/etc/ocihook/libexec")
    with another(scratch / "other", workload) as (other, url):
        other.make("run", "job", "--volume", "/cache", "--ulimit", "nofile=100:200", "--env", "SIZE=1 2")
        other.wait_to_count("job")
        other.write("job", "/state/file", "kept")
        with pytest.raises(CommandError, match=r"image localhost/workload:latest \(\w+\) is not here. Pull it, or"):
            here.ocihook("run", "--from", "job", "--on", url)
        assert other.is_running("job")
        other("save", "--output", str(scratch / "saved.tar"), IMAGE)
        here("load", "--input", str(scratch / "saved.tar"))
        said = here.ocihook("run", "--from", "job", "--on", url)
        last = other.counts("job")[-1]
        assert not other.is_running("job")
    assert "container job was checkpointed on unix:" in said
    here.wait_to_count("job")
    assert here.counts("job")[0] == last + 1
    assert here.file("job", "/state/file") == "kept"
    what = here("inspect", "--format", "{{.HostConfig.Ulimits}} {{.Config.Env}} {{.HostConfig.NetworkMode}}", "job")
    assert all(word in what for word in ("NOFILE 100 200", "SIZE=1 2", "host"))

    (first,) = ids(here)
    for words, message in (
        (("--from", "nobody"), "neither the store nor the remote nor an archive has a checkpoint nobody"),
        (("--from", first, "--name", "twin"), f"checkpoint {first} runs already, as container job"),
    ):
        with pytest.raises(CommandError, match=message):
            here.ocihook("run", *words)
    here.remove("job")
    with pytest.raises(
        CommandError,
        match=r"checkpoint .* is not restored, and no container is left: .*mounts that are missing: /cache",
    ):
        here.ocihook("run", "--from", "job", "--", "--network", "host", IMAGE, "/workload", "4")
    assert here("ps", "--all", "--quiet") == ""
    made = json.loads(here.ocihook("run", "--from", first, "--name", "again", "--json"))
    assert (made["name"], made["checkpoint"]) == ("again", first)
    here.wait_to_count("again")
    assert here.counts("again")[0] == last + 1
