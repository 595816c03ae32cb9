"""The installer image, run as a privileged container on a node whose root it is given, as a DaemonSet's pod is."""

import contextlib
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

from integration.journals import last_session, sessions
from integration.namespace import wait_for
from integration.packages.conftest import MakeNode
from integration.packages.engine import Node
from integration.packages.test_packages import meanwhile
from integration.podman.engine import assert_packed

INSTALLER = "run --rm --privileged --pid=host --network=none --pids-limit=0 --volume=/:/host:rslave"


def make_base(node: Node) -> None:
    """Give the node an image with a shell and nothing else."""
    archive = node.scratch / "base.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("proc", "sys", "dev", "tmp", "host", "bin"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        busybox = shutil.which("busybox")
        assert busybox
        tar.add(os.path.realpath(busybox), "bin/busybox")
        applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
        for name in applets:
            entry = tarfile.TarInfo(f"bin/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            if name != "busybox":
                tar.addfile(entry)
    node("import", str(archive), "localhost/base")


def build(node: Node, context: Path, tag: str) -> str:
    place = node.scratch / tag
    subprocess.run(["cp", "-a", context, place], check=True)
    image = f"localhost/ocihook:{tag}"
    node("build", "--pull=never", "--build-arg=BASE=localhost/base", f"--tag={image}", str(place))
    return image


def installer(node: Node, image: str, *arguments: str) -> str:
    return node(*INSTALLER.split(), image, *arguments)


def test_image_comes_serves_is_exchanged_and_goes(image_contexts: tuple[Path, Path], make_node: MakeNode) -> None:
    node = make_node("trixie")
    make_base(node)
    first, second = (build(node, context, context.name) for context in image_contexts)
    node.put("/etc/criu/runc.conf", "action-script /usr/local/bin/meanwhile\n")
    node.put("/usr/local/bin/meanwhile", "#!/bin/sh\n", 0o755)
    before = node.files()
    installer(node, first, "install")
    installer(node, first, "install")
    assert {name for name in node.files() - before if not name.startswith("opt/ocihook/")} == {"etc/criu/default.conf"}
    assert "A checkpoint will work here" in node.namespace.run("/opt/ocihook/bin/ocihook", "doctor")

    archives = [node.scratch / f"{number}.tar" for number in range(3)]
    node.start("c")
    # Another release comes while CRIU dumps: the agent that works is of the first, whose modules stay.
    releases = node.namespace.path("/opt/ocihook/lib/ocihook")
    (old,) = releases.iterdir()
    command = f"podman {' '.join(node.options())} {INSTALLER} {second} install"
    meanwhile(node, f"{command} >/run/install.log 2>&1")
    node.checkpoint("c", archives[0], "--leave-running")
    log = node.namespace.path("/run/install.log").read_text()
    assert "0.2.0" in node.namespace.run("/opt/ocihook/bin/ocihook", "--version"), log
    assert_packed(archives[0])
    assert last_session(node.namespace, "post-dump")["stages"].keys() == {"pre-dump", "post-dump", "detached"}
    assert f"{old.name} is still in use" in log
    wait_for("the agent to leave", lambda: not is_in_use(old.name))
    installer(node, second, "install")
    assert [path.name for path in releases.iterdir()] == ["0.2.0-later"]
    node.checkpoint("c", archives[1])
    before_restore = node.count("c")
    node.remove("c")
    node.restore(archives[1])
    node.assert_goes_on("c", before_restore)

    # It is removed while CRIU dumps: the dump ends as it began.
    command = f"podman {' '.join(node.options())} {INSTALLER} {second} remove"
    meanwhile(node, f"setsid sh -c '{command}; echo $? >/run/removed' </dev/null >/run/remove.log 2>&1 &")
    node.checkpoint("c", archives[2], "--leave-running")
    assert_packed(archives[2])
    removed = node.namespace.path("/run/removed")
    wait_for("the release to be removed", lambda: removed.exists() and bool(removed.read_text()))
    assert removed.read_text() == "0\n", node.namespace.path("/run/remove.log").read_text()
    sessions(node.namespace)
    assert node.criu_configuration() == "action-script /usr/local/bin/meanwhile\n"
    assert node.files() - before == set()
    assert not node.namespace.path("/opt/ocihook").exists()
    installer(node, second, "remove")


def test_image_installs_the_runtime_handler_and_takes_it_away(
    image_contexts: tuple[Path, Path], make_node: MakeNode
) -> None:
    node = make_node("trixie")
    make_base(node)
    first, second = (build(node, context, context.name) for context in image_contexts)
    node.put("/usr/local/bin/containerd", "#!/bin/sh\necho containerd containerd.io v2.1.4 0\n", 0o755)
    node.put("/usr/local/bin/systemctl", '#!/bin/sh\necho "$@" >> /run/systemctl.log\n', 0o755)
    node.put("/run/systemd/system/any", "")
    before = node.files()
    for _ in range(2):
        installer(node, first, "install", "--runtime")
    calls = node.namespace.path("/run/systemctl.log").read_text().splitlines()
    assert [call for call in calls if "containerd" in call] == ["try-reload-or-restart containerd.service"]
    handler = node.namespace.path("/opt/ocihook/libexec/ocihook/ocihook-runc")
    (old,) = node.namespace.path("/opt/ocihook/lib/ocihook").iterdir()
    assert old.name in handler.read_text()
    # Another release, whose manifest does not ask for the handler: it stays, and runs that release.
    installer(node, second, "install")
    assert "0.2.0-later" in handler.read_text()
    assert old.name not in handler.read_text()
    assert not old.exists()
    node(
        "run",
        "--runtime=ocihook",
        "--rm",
        "--pids-limit=0",
        "--network=none",
        "--annotation=ocihook.io/mode=store",
        "localhost/base",
        "true",
    )
    installer(node, second, "remove")
    assert node.files() - before == set()
    assert not node.namespace.path("/opt/ocihook").exists()


def test_image_is_not_installed_where_no_python_can_run_it(
    image_contexts: tuple[Path, Path], make_node: MakeNode
) -> None:
    node = make_node("trixie")
    make_base(node)
    image = build(node, image_contexts[0], "first")
    before = node.files()
    node.namespace.run("sh", "-c", "for python in /usr/bin/python3.1?; do mount --bind /dev/null $python; done")
    output = node(*INSTALLER.split(), image, "serve", check=False)
    assert "the host has no Python 3.11 or later in /usr/bin" in output
    assert {name for name in node.files() - before if not name.startswith("opt/ocihook/.lock")} == set()


def is_in_use(release: str) -> bool:
    """Return whether a process of this machine has been started from a release."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"/opt/ocihook/lib/ocihook/{release}/" in path.read_text():
                return True
    return False
