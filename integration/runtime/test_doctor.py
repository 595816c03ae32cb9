"""doctor knows containers and images as podman does: by exact name before the beginning of an id, and by image id."""

import json
from pathlib import Path

import pytest

from integration.namespace import wait_for
from integration.podman.engine import IMAGE
from integration.runtime.conftest import MakeHandled
from integration.runtime.engine import HandledPodman


@pytest.fixture
def podman(make_handled: MakeHandled) -> HandledPodman:
    """A podman that doctor's own calls of podman find."""
    podman = make_handled("runc")
    podman.use_by_default()
    return podman


def checks(podman: HandledPodman, *words: str) -> dict[str, str]:
    """Return the status of each finding of doctor, by its check."""
    return {finding["check"]: finding["status"] for finding in findings(podman, *words)}


def findings(podman: HandledPodman, *words: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(podman.ocihook("doctor", *words, "--json", check=False))["findings"]
    return found


def container_id(podman: HandledPodman, name: str) -> str:
    return podman("inspect", "--format", "{{.Id}}", name).strip()


@pytest.mark.parametrize("is_changed", [False, True])
def test_an_image_by_its_id(podman: HandledPodman, workload: Path, *, is_changed: bool) -> None:
    """Its name may be another image's by now; podman wants the very one."""
    archive = podman.scratch / "a.tar"
    podman.start("job", 4)
    podman.checkpoint("job", archive)
    podman.remove("job")
    if is_changed:
        podman("rmi", "--force", IMAGE)
        changed = podman.scratch / "changed"
        changed.write_bytes(workload.read_bytes() + b"another build")
        podman._import_image(changed, None)
    assert checks(podman, "--archive", str(archive))["image"] == ("fail" if is_changed else "ok")
    podman.restore(archive, check=False)
    assert podman.is_running("job") is not is_changed


def test_a_pod_that_shares_its_pids(podman: HandledPodman) -> None:
    """There a container is not the first process of its PID namespace, which is not the node's either."""
    infra = ["--infra-image", IMAGE, "--infra-command", "/workload pause"]
    podman("pod", "create", *infra, "--name", "pod", "--share", "ipc,net,uts,pid", "--network", "none")
    podman("run", "--detach", "--name", "job", "--pod", "pod", "--pids-limit", "0", IMAGE, "/workload", "4")
    wait_for("job to count", lambda: podman.count("job")[0] > 2)
    assert checks(podman, "--container", "job")["pid-taken"] == "warn"


def test_a_name_before_the_beginning_of_an_id(podman: HandledPodman) -> None:
    """As podman: `db` is the container of that name, whichever id begins with db."""
    podman.make("run", "first")
    short = container_id(podman, "first")[:2]
    podman.make("run", short, "--annotation", "ocihook.io/no-such-thing=1")  # which doctor warns of
    wait_for("both to run", lambda: podman.is_running(short))
    assert any("no-such-thing" in finding["detail"] for finding in findings(podman, "--container", short))
    by_id = findings(podman, "--container", container_id(podman, "first")[:20])
    assert not any("no-such-thing" in finding["detail"] for finding in by_id)


def test_a_secret_does_not_come_back_from_an_archive(podman: HandledPodman) -> None:
    secret, archive = podman.scratch / "secret", podman.scratch / "a.tar"
    secret.write_text("hush")
    podman("secret", "create", "word", str(secret))
    common = ["--detach", "--network", "none", "--pids-limit", "0"]
    podman("run", *common, "--name", "file", "--secret", "word", IMAGE, "/workload", "4")
    podman("run", *common, "--name", "env", "--secret", "word,type=env", IMAGE, "/workload", "4")  # the remedy
    said = {}
    for name in ("file", "env"):
        wait_for(f"{name} to count", lambda name=name: podman.count(name)[0] > 2)  # type: ignore[misc]
        said[name] = checks(podman, "--container", name).get("mount")
        podman.checkpoint(name, archive)
        podman.remove(name)
        podman.restore(archive, check=False)
        assert podman.is_running(name) is (name == "env")
    assert said == {"file": "warn", "env": None}
