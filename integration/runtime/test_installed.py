"""What `ocihook install --runtime` writes, read by a real podman: handler and OCI hook, until they are removed."""

from pathlib import Path

import pytest

from integration.namespace import CommandError, wait_for
from integration.runtime.conftest import MakeHandled
from integration.runtime.engine import HandledPodman
from ocihook.node.handlers import HOOK_FILE, HOOK_NAME, PODMAN_DROP_IN

LIBEXEC = Path("/etc/ocihook/libexec")
INSTALLED = (HOOK_FILE, PODMAN_DROP_IN, *(LIBEXEC / name for name in (HOOK_NAME, "ocihook-runc", "ocihook-crun")))
WRONG = "annotation ocihook.io/mode: mode must be one of"
_OWN_SHARE = """
cd "$1" && mkdir share share-work
mount -t overlay overlay -o "lowerdir=$2,upperdir=$1/share,workdir=$1/share-work" "$2"
"""


@pytest.fixture
def podman(make_handled: MakeHandled) -> HandledPodman:
    """A podman that has the handler by its drop-in alone, and by its name."""
    podman = make_handled("crun")
    podman.namespace.run("sh", "-ec", _OWN_SHARE, "sh", str(podman.scratch / "mounts"), "/usr/share/containers")
    podman.ocihook("install", "--runtime", "--libexec", str(LIBEXEC))
    podman.runtime = "ocihook"
    return podman


def there(podman: HandledPodman) -> list[Path]:
    return [place for place in INSTALLED if podman.namespace.path(str(place)).exists()]


def use(podman: HandledPodman, runtime: str) -> None:
    """Have podman use a runtime without the handler."""
    podman.runtime = podman.namespace.run("sh", "-c", f"command -v {runtime}").strip()


def assert_refused(podman: HandledPodman, message: str, **annotations: str) -> None:
    with pytest.raises(CommandError, match=message):
        podman.make("run", "wrong", **annotations)
    assert podman.counts("wrong") == []
    podman.remove("wrong")


def assert_runs(podman: HandledPodman, **annotations: str) -> None:
    podman.make("run", "right", **annotations)
    wait_for("it to count", lambda: podman.counts("right") != [])
    podman.remove("right")


def test_an_engine_uses_what_is_installed_until_it_is_removed(podman: HandledPodman) -> None:
    assert there(podman) == [*INSTALLED]
    again = {"checkpoint_on_stop": "true", "restore_from": "latest"}
    podman.make("run", "job", **again)
    podman.wait_to_count("job")
    with pytest.raises(CommandError, match="containers were made by the runtime handler"):
        podman.ocihook("uninstall", "--libexec", str(LIBEXEC), "--timeout", "0")
    last = podman.stop("job")
    podman.make("run", "job", **again)
    podman.wait_to_count("job")
    assert podman.counts("job")[0] == last + 1
    podman.remove("job")
    # It does not wait here for the CRIU of others on this machine, which comes after the handler.
    podman.ocihook("uninstall", "--libexec", str(LIBEXEC), "--timeout", "0", check=False)
    assert there(podman) == []
    with pytest.raises(CommandError, match='"ocihook" not found'):
        podman.make("create", "job", **again)
    use(podman, "crun")
    assert_runs(podman, mode="shop")


@pytest.mark.parametrize("runtime", ["runc", "crun"])
def test_wrong_annotations_are_refused_when_a_container_is_made(podman: HandledPodman, runtime: str) -> None:
    """With the handler and without it; other containers are not touched, whatever has become of the hook."""
    assert_refused(podman, WRONG, mode="shop")
    use(podman, runtime)
    assert_refused(podman, WRONG if runtime == "runc" else HOOK_NAME, mode="shop")  # crun reports its status alone
    assert podman.agent_log().count(WRONG) >= 1
    assert_runs(podman, mode="off")
    assert_runs(podman)
    podman.namespace.path(str(LIBEXEC / HOOK_NAME)).unlink()
    assert_runs(podman, mode="shop")  # podman calls no hook whose program is not there
    assert_runs(podman)
