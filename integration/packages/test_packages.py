"""Packages on fresh nodes: installed, used, exchanged and removed while containers are checkpointed."""

from pathlib import Path

import pytest

from integration.journals import last_session, sessions
from integration.namespace import wait_for
from integration.packages.conftest import Built, MakeNode, copy_to
from integration.packages.engine import Node
from integration.podman.engine import assert_packed, image_names
from integration.soft_dirty import note
from tests.fakes.authority import Authority

# CRIU runs this, too, at each stage before ours: in the middle of a dump, something happens.
_MEANWHILE = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] && [ ! -e /run/done ] || exit 0
tr '\\0' ' ' < "/proc/$(cat /run/ocihook/agent.lock)/cmdline" > /run/done
{command}
"""
# Once it is taken there is no room for its packs.
_NO_ROOM = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] || exit 0 # before that, the dump would not choose the store
packs=/var/lib/ocihook/store/domains/_node/packs
mountpoint -q "$packs" || mount -t tmpfs -o size=64k tmpfs "$packs"
"""
# By the name of an engine, what one finds when it starts; and what it is to wait for takes long.
_ENGINE = """[Service]
Type=oneshot
ExecStart=/bin/sh -c 'cat /etc/criu/*.conf >/run/seen.new; mv /run/seen.new /run/seen'
[Install]
WantedBy=multi-user.target
"""
_SLOW = """[Service]
ExecStartPre=/bin/sleep 1
"""
_LISTEN = "127.0.0.1:17443"
# A member of a gang, as soon as its coordinator can be reached.
_JOIN = """
from ocihook.config import load_settings
from ocihook.gang.link import Link
from ocihook.gang.membership import GangJoined
from ocihook.linux.patience import Patience
from ocihook.model import GangRef
link = Link.of(load_settings())
GangJoined(gang=GangRef("", "job", "job0", 2), link=link, session="s").enter("dump", Patience())
"""
COMMANDS = {
    "deb": ("dpkg --install", "dpkg --remove ocihook", "dpkg --purge ocihook"),
    "rpm": ("rpm --upgrade --nodeps", "rpm --erase ocihook", "true"),
}


def meanwhile(node: Node, command: str) -> None:
    """Have CRIU run a command once, in the middle of the next dump: the agent has begun and not yet packed."""
    node.put("/usr/local/bin/meanwhile", _MEANWHILE.format(command=command), 0o755)
    node.namespace.path("/run/done").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("kind", "suite", "systemd"),
    [("deb", "bookworm", False), ("deb", "trixie", True), ("rpm", "trixie", True)],
)
def test_package_comes_serves_is_exchanged_and_goes(
    built: Built, make_node: MakeNode, kind: str, suite: str, *, systemd: bool
) -> None:
    node = make_node(suite, systemd=systemd)
    install, remove, purge = COMMANDS[kind]
    first, second = copy_to(node, *(built.debs if kind == "deb" else built.rpms))
    node.put("/etc/criu/runc.conf", "action-script /usr/local/bin/meanwhile\n")
    node.put("/usr/local/bin/meanwhile", "#!/bin/sh\n", 0o755)
    before = node.files()
    node.run("sh", "-c", f"{install} {first}")
    assert "BEGIN ocihook" not in node.criu_configuration()
    assert {name for name in node.files() - before if not is_of_package(name)} == set()
    node.ocihook("install")
    doctor = node.ocihook("doctor")
    assert "/usr/libexec/ocihook/criu-action, starts in" in doctor
    assert "A checkpoint will work here" in doctor
    assert_bytecode_is_not_checked(node, built.release)

    if systemd:
        assert "systemd starts it" in doctor
        assert_agent_can_do_all_under_systemd(node)
    archives = [node.scratch / f"{number}.tar" for number in range(3)]
    node.start("c")
    # The package is exchanged while CRIU dumps: an agent of the version before serves the hook of the next.
    meanwhile(node, f"{install} {second} >/run/install.log 2>&1")
    node.checkpoint("c", archives[0], "--leave-running")
    log = node.namespace.path("/run/install.log").read_text()
    assert node.ocihook("--version") == "ocihook, version 0.2.0\n", log
    assert built.release in node.namespace.path("/run/done").read_text()
    assert_packed(archives[0])
    assert last_session(node.namespace, "post-dump")["stages"].keys() == {"pre-dump", "post-dump", "detached"}
    node.checkpoint("c", archives[1])
    before_restore = node.count("c")
    node.remove("c")
    node.restore(archives[1])
    node.assert_goes_on("c", before_restore)

    # It is removed while CRIU dumps: the dump ends as it began, then the package goes.
    meanwhile(node, f"setsid sh -c '{remove}; echo $? >/run/removed' </dev/null >/run/remove.log 2>&1 &")
    node.checkpoint("c", archives[2], "--leave-running")
    assert_packed(archives[2])
    removed = node.namespace.path("/run/removed")
    wait_for("the package to be removed", lambda: removed.exists() and bool(removed.read_text()))
    assert removed.read_text() == "0\n", node.namespace.path("/run/remove.log").read_text()
    assert node.criu_configuration() == "action-script /usr/local/bin/meanwhile\n"
    node.checkpoint("c", archives[2], "--leave-running")  # CRIU's own again
    sessions(node.namespace)
    node.run("sh", "-c", purge)
    left = node.files() - before
    kept_by_rpm = {f"etc/ocihook/config.toml.{end}" for end in ("rpmnew", "rpmsave")}  # of one that was changed
    assert {name for name in left if "ocihook" in name or "criu" in name} <= {"etc/criu/runc.conf", *kept_by_rpm}


def test_a_purge_takes_no_checkpoint_and_no_key(built: Built, make_node: MakeNode) -> None:
    """One of two checkpoints, encrypted with a key where docs/encryption.md has it, cannot be stored."""
    node = make_node("bookworm")
    (package,) = copy_to(node, built.debs[0])
    node.put("/etc/criu/runc.conf", "action-script /usr/local/bin/meanwhile\n")
    node.put("/usr/local/bin/meanwhile", "#!/bin/sh\n", 0o755)
    node.run("dpkg", "--install", package)
    node.ocihook("install")
    keys = node.namespace.path("/etc/ocihook/store.keys")
    node.put("/etc/ocihook/store.keys", "ab" * 32 + "\n", 0o600)
    node.configure('[agent]\nidle_timeout_s = 1\nkey_file = "/etc/ocihook/store.keys"\n[policy]\nmode = "store"\n')
    archives = [node.scratch / f"{number}.tar" for number in range(2)]
    node.start("c")
    node.checkpoint("c", archives[0], "--leave-running")
    node.ocihook("wait")
    node.put("/usr/local/bin/meanwhile", _NO_ROOM, 0o755)
    node.checkpoint("c", archives[1])
    before = node.count("c")
    node.remove("c")
    wait_for("the reason", lambda: "No space left" in node.ocihook("store", "list"))
    assert "is pending" in node.ocihook("ps")
    assert "store pending" in node.ocihook("doctor", check=False)

    said = node.run("sh", "-c", "dpkg --purge ocihook 2>&1")
    assert "is not complete" in said
    assert "/etc/ocihook (keys, names of stores): it stays" in said
    assert "/run/ocihook has memory of checkpoints that are not stored yet" in said
    assert "no packages found" in node.run("dpkg-query", "--show", "ocihook", check=False)
    assert keys.read_text() == "ab" * 32 + "\n"
    node.run("umount", "--lazy", "/var/lib/ocihook/store/domains/_node/packs")
    node.run("dpkg", "--install", package)
    node.ocihook("install")
    node.ocihook("wait")
    assert "every byte right" in node.ocihook("store", "verify", "--read-data")
    node.restore(archives[1])
    node.assert_goes_on("c", before)


def test_a_kernel_that_no_longer_marks_pages_is_seen_before_engines_start(built: Built, make_node: MakeNode) -> None:
    """With what --track-memory writes CRIU would refuse every dump and restore."""
    node = make_node("trixie", systemd=True)
    (package,) = copy_to(node, built.debs[0])
    node.run("dpkg", "--install", package)
    assert systemctl(node, "is-enabled", "ocihook-kernel.service") == "enabled"
    node.put("/etc/systemd/system/containerd.service", _ENGINE)
    node.put("/etc/systemd/system/ocihook-kernel.service.d/slow.conf", _SLOW)
    systemctl(node, "enable", "containerd.service")
    systemctl(node, "daemon-reload")
    site = Path(f"/usr/lib/ocihook/{built.release}/site-packages")
    for works in (True, False):
        note(node.namespace, "python3", site, works=True)
        node.ocihook("install", "--track-memory")
        installed = node.criu_configuration()
        assert {"track-mem", "prev-images-dir /"} <= set(installed.splitlines())
        note(node.namespace, "python3", site, works=works)
        seen = boot(node)
        expected = installed if works else installed.replace("track-mem\nprev-images-dir /\n", "")
        assert seen == expected == node.criu_configuration()
        assert "action-script" in seen
        assert systemctl(node, "show", "--property=Result,ExecMainStatus", "--value", "ocihook-kernel.service") == (
            "success\n0"
        )


def test_a_coordinator_is_a_unit_that_an_administrator_enables(built: Built, make_node: MakeNode) -> None:
    node = make_node("trixie", systemd=True)
    (package,) = copy_to(node, built.debs[0])
    node.run("dpkg", "--install", package)
    unit = "ocihook-coordinator.service"
    assert systemctl(node, "is-enabled", unit, check=False) == "disabled"
    for path in Authority().give(node.scratch / "tls", "node").iterdir():
        node.put(f"/etc/ocihook/tls/{path.name}", path.read_text(), 0o600)
    node.put("/etc/ocihook/config.d/gangs.toml", f'[agent]\ncoordinator = "https://{_LISTEN}"\n')
    node.put(f"/etc/systemd/system/{unit}.d/listen.conf", f"[Service]\nEnvironment=LISTEN={_LISTEN}\n")
    systemctl(node, "daemon-reload")
    systemctl(node, "enable", "--now", unit)
    site = f"PYTHONPATH=/usr/lib/ocihook/{built.release}/site-packages"
    node.namespace.run("env", site, "python3", "-c", _JOIN)
    assert "job0 joined" in node.ocihook("gang", "status")
    node.run("dpkg", "--remove", "ocihook")
    assert systemctl(node, "is-active", unit, check=False) == "inactive"


def boot(node: Node) -> str:
    """Have systemd start what a boot starts, in its order; return CRIU's configuration as an engine has found it."""
    seen = node.namespace.path("/run/seen")
    seen.unlink(missing_ok=True)
    systemctl(node, "start", "multi-user.target")
    wait_for("an engine to start", seen.exists)
    return seen.read_text()


def assert_agent_can_do_all_under_systemd(node: Node) -> None:
    """Check that the unit's limits keep the agent from nothing: GPU memory, the store, freezer, other processes."""
    archive = node.scratch / "gpu.tar"
    node.start_cuda("gpu", 24, mode="store")
    assert systemctl(node, "is-active", "ocihook.service", check=False) == "inactive"
    node.checkpoint("gpu", archive, "--leave-running")
    assert systemctl(node, "is-active", "ocihook.service") == "active"
    agent = systemctl(node, "show", "--property=MainPID", "--value", "ocihook.service")
    assert "Seccomp:\t0\n" in node.run("cat", f"/proc/{agent}/status"), "else it may not suspend that of a container"
    assert_has_no_page_images(archive)
    before = node.count("gpu")
    node.assert_goes_on("gpu", before)
    node.ocihook("wait")
    assert "complete" in node.ocihook("store", "list")
    node.remove("gpu")
    node.restore(archive)
    node.assert_goes_on("gpu", before)
    assert last_session(node.namespace, "post-resume")["effects"] == []
    node.remove("gpu")
    assert systemctl(node, "show", "--property=Result,ExecMainStatus", "--value", "ocihook.service") == "success\n0"
    session = last_session(node.namespace, "pre-dump")
    told = node.namespace.run(
        "journalctl", "--quiet", f"OCIHOOK_CONTAINER={session['container']['id']}", "--output=cat"
    )
    assert "post-dump: " in told
    systemctl(node, "start", "ocihook-prune.service")
    assert systemctl(node, "is-active", "ocihook-prune.timer") == "active"


def systemctl(node: Node, *arguments: str, check: bool = True) -> str:
    return node.namespace.run("systemctl", *arguments, check=check).strip()


def assert_has_no_page_images(archive: Path) -> None:
    assert not any(name.startswith("pages-") or name.endswith(".pack") for name in image_names(archive))


def is_of_package(name: str) -> bool:
    """Return whether a file is where a package may have one, or where dpkg and its helpers keep their records."""
    ours = ("usr/bin/ocihook", "usr/lib/ocihook/", "usr/libexec/ocihook/", "usr/share/doc/ocihook/", "etc/ocihook/")
    units = ("usr/lib/systemd/", "etc/systemd/system/", "usr/lib/tmpfiles.d/ocihook", "usr/share/lintian/overrides/")
    hooks = ("usr/share/containers/oci/hooks.d/50-ocihook.json",)
    shared = ("licenses/ocihook/", "ocihook/", "man/", "bash-completion/", "zsh/", "fish/")
    return name.startswith((*ours, *units, *hooks, *(f"usr/share/{directory}" for directory in shared)))


def assert_bytecode_is_not_checked(node: Node, release: str) -> None:
    """Check that all modules have bytecode for the node's Python that holds whatever times and mode files have."""
    site = node.namespace.path(f"/usr/lib/ocihook/{release}/site-packages")
    modules = list(site.rglob("*.py"))
    assert len(modules) > 100
    for module in modules:
        compiled = list((module.parent / "__pycache__").glob(f"{module.stem}.cpython-3*.pyc"))
        assert compiled, module
        assert {int.from_bytes(path.read_bytes()[4:8], "little") for path in compiled} == {1}, module  # PEP 552
