"""Installing and uninstalling in a file system tree: what was there before is there afterwards, byte for byte."""

import contextlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ocihook.criu import version
from ocihook.criu.conf import options, plugin_dir
from ocihook.criu.version import Program
from ocihook.errors import ConfigError, UnsupportedError
from ocihook.node import install
from ocihook.node.install import LIBEXEC, apply_install, apply_uninstall, plan_install, plan_uninstall

Tree = dict[str, tuple[int, bytes | str | None]]


def tree(root: Path) -> Tree:
    found: Tree = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        content = os.readlink(path) if stat.S_ISLNK(mode) else path.read_bytes() if stat.S_ISREG(mode) else None
        found[str(path.relative_to(root))] = (mode, content)
    return found


def do_install(root: Path) -> None:
    apply_install(plan_install(root), root)


def do_uninstall(root: Path) -> None:
    apply_uninstall(plan_uninstall(root), root)


def empty(_root: Path) -> None:
    pass


def with_foreign_lines(root: Path) -> None:
    conf = root / "etc/criu"
    conf.mkdir(parents=True)
    (conf / "runc.conf").write_bytes(b"tcp-established\r\naction-script /usr/bin/other")
    (conf / "runc.conf").chmod(0o640)
    (conf / "crun.conf").write_bytes(b"")
    (conf / "default.conf").write_bytes(b"# nothing\n\n")


def with_links_into_nothing_and_from_the_root(root: Path) -> None:
    (root / "etc").mkdir()
    (root / "etc/criu").symlink_to("/srv/criu")
    (root / "srv/criu").mkdir(parents=True)
    (root / "srv/criu/runc.conf").symlink_to("/srv/shared/../shared/runc.conf")
    (root / "srv/criu/default.conf").symlink_to("../../../../etc/criu.conf")
    (root / "etc/criu.conf").write_text("shell-job\n")
    (root / "usr/lib/systemd/system").mkdir(parents=True)


def with_links_and_systemd(root: Path) -> None:
    (root / "etc/criu").mkdir(parents=True)
    (root / "srv").mkdir()
    (root / "srv/runc.conf").write_text("ghost-limit 10M\n")
    (root / "etc/criu/runc.conf").symlink_to("../../srv/runc.conf")
    (root / "usr/lib/systemd/system").mkdir(parents=True)
    (root / "etc/systemd/system/sockets.target.wants").mkdir(parents=True)
    (root / "etc/systemd/system/sockets.target.wants/other.socket").symlink_to("/x")


def with_plugins(root: Path) -> None:
    (root / "usr/lib/criu").mkdir(parents=True)
    for name in ("amdgpu_plugin.so", "cuda_plugin.so"):
        (root / "usr/lib/criu" / name).touch()


TREE_MAKERS = [
    empty,
    with_foreign_lines,
    with_links_into_nothing_and_from_the_root,
    with_links_and_systemd,
    with_plugins,
]
TREES = pytest.mark.parametrize("prepare", TREE_MAKERS)


@pytest.mark.parametrize("own", ["", "network-lock skip\n"])
def test_options_about_connections_go_where_they_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str
) -> None:
    """Runtimes overrule default.conf; a network-lock elsewhere crashes CRIU; what an administrator has set stays."""
    monkeypatch.setattr(install, "locks_by_nftables", lambda _root: True)
    conf = tmp_path / "etc/criu"
    conf.mkdir(parents=True)
    (conf / "crun.conf").write_bytes(b"")
    (conf / "default.conf").write_text(own)
    do_install(tmp_path)
    kept, lock = {"tcp-established", "skip-in-flight"}, {"network-lock"}
    about = kept | lock | {"tcp-close"}
    found = {name: {o.name for o in options((conf / name).read_bytes())} & about for name in install.CONF_NAMES}
    assert found == {"runc.conf": kept, "crun.conf": kept, "default.conf": {"skip-in-flight", *lock}}
    assert (conf / "default.conf").read_text().count("network-lock") == 1
    assert ("network-lock nftables" in (conf / "default.conf").read_text()) is not bool(own)


@TREES
def test_uninstall_leaves_what_was_there_before(tmp_path: Path, prepare: Callable[[Path], None]) -> None:
    prepare(tmp_path)
    before = tree(tmp_path)
    do_install(tmp_path)
    assert tree(tmp_path) != before
    installed = tree(tmp_path)
    do_install(tmp_path)
    assert tree(tmp_path) == installed
    assert plan_install(tmp_path) == []
    do_uninstall(tmp_path)
    assert tree(tmp_path) == before
    assert plan_uninstall(tmp_path) == []
    do_uninstall(tmp_path)
    assert tree(tmp_path) == before


def test_what_is_installed_runs_the_hook(tmp_path: Path) -> None:
    with_links_and_systemd(tmp_path)
    do_install(tmp_path)
    launcher = tmp_path / LIBEXEC.relative_to("/") / "criu-action"
    assert launcher.stat().st_mode & 0o777 == 0o755
    for stage in ("network-lock", "self-test"):
        done = subprocess.run(
            [launcher], env={"CRTOOLS_SCRIPT_ACTION": stage}, capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "Installed by `ocihook install`" in launcher.read_text()
    # Through a link, the file it leads to is edited, and the link stays.
    assert (tmp_path / "etc/criu/runc.conf").is_symlink()
    assert f"action-script {LIBEXEC}/criu-action" in (tmp_path / "srv/runc.conf").read_text()
    assert "@" not in launcher.read_text()
    units = tmp_path / "etc/systemd/system"
    assert {link.name for link in units.glob("*.wants/ocihook*")} == set(install.WANTED_BY)
    assert "ListenSequentialPacket=/run/ocihook/agent.sock" in (units / "ocihook.socket").read_text()
    assert "-m ocihook agent" in (units / "ocihook.service").read_text()
    assert os.readlink(units / "sockets.target.wants/ocihook.socket") == "/etc/systemd/system/ocihook.socket"


class Killed(BaseException):
    """What a test interrupts with."""


@TREES
@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("goes_on", [True, False])
def test_interrupted_anywhere_it_can_be_repeated_or_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Path], None], number: int, *, goes_on: bool
) -> None:
    prepare(tmp_path)
    before = tree(tmp_path)
    apply = install.apply_change

    def interrupt_after(number: int) -> None:
        left = iter(range(number))

        def apply_some(change: install.Change) -> None:
            if next(left, None) is None:
                raise Killed
            apply(change)

        monkeypatch.setattr(install, "apply_change", apply_some)

    interrupt_after(number)
    with contextlib.suppress(Killed):
        do_install(tmp_path)
    if goes_on:
        monkeypatch.setattr(install, "apply_change", apply)
        do_install(tmp_path)
        assert plan_install(tmp_path) == []
    interrupt_after(number // 2)
    with contextlib.suppress(Killed):
        do_uninstall(tmp_path)
    monkeypatch.setattr(install, "apply_change", apply)
    do_uninstall(tmp_path)
    assert tree(tmp_path) == before


def test_nothing_points_into_the_void_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_foreign_lines(tmp_path)
    launcher = tmp_path / LIBEXEC.relative_to("/") / "criu-action"
    apply = install.apply_change
    seen = []

    def apply_and_look(change: install.Change) -> None:
        apply(change)
        is_named = any(b"BEGIN ocihook" in conf.read_bytes() for conf in (tmp_path / "etc/criu").iterdir())
        seen.append((is_named, launcher.exists()))

    monkeypatch.setattr(install, "apply_change", apply_and_look)
    do_install(tmp_path)
    do_uninstall(tmp_path)
    assert {(False, True), (True, True), (False, False)} == set(seen)


def test_links_of_a_tree_do_not_lead_out_of_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside.conf"
    outside.write_text("untouched\n")
    root = tmp_path / "root"
    (root / "etc/criu").mkdir(parents=True)
    (root / "etc/criu/runc.conf").symlink_to(outside)
    (root / "etc/criu/default.conf").symlink_to("../../../outside.conf")
    do_install(root)
    assert outside.read_text() == "untouched\n"
    assert "action-script" in (root / outside.relative_to("/")).read_text()
    assert "action-script" in (root / "outside.conf").read_text()
    (root / "etc/criu/crun.conf").symlink_to("crun.conf")
    with pytest.raises(UnsupportedError, match=r"crun.conf leads to itself"):
        plan_install(root)


def test_a_launcher_of_others_is_neither_replaced_nor_removed(tmp_path: Path) -> None:
    foreign = tmp_path / LIBEXEC.relative_to("/") / "criu-action"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("#!/bin/sh\n")
    with pytest.raises(UnsupportedError, match=r"criu-action is not ocihook's; nothing was changed"):
        plan_install(tmp_path)
    do_uninstall(tmp_path)
    assert foreign.read_text() == "#!/bin/sh\n"


def test_a_launcher_that_moved_leaves_nothing_where_it_was(tmp_path: Path) -> None:
    elsewhere = Path("/opt/hook")
    apply_install(plan_install(tmp_path, elsewhere), tmp_path)
    assert (tmp_path / "opt/hook/criu-action").exists()
    do_install(tmp_path)
    assert not (tmp_path / "opt/hook/criu-action").exists()
    assert str(LIBEXEC) in (tmp_path / "etc/criu/runc.conf").read_text()
    apply_install(plan_install(tmp_path, elsewhere), tmp_path)
    do_uninstall(tmp_path)  # finds it by the block that names it
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("libexec", ["relative", "/a b", "/a'b", "/a#b", "/a%b", "/a\nb"])
def test_a_path_that_cannot_be_named_everywhere_is_refused(tmp_path: Path, libexec: str) -> None:
    with pytest.raises(UnsupportedError, match=r"criu-action cannot be named in CRIU's configuration"):
        plan_install(tmp_path, Path(libexec))


def test_mode_and_owner_of_the_launcher_are_set_right_again(tmp_path: Path) -> None:
    do_install(tmp_path)
    launcher = tmp_path / LIBEXEC.relative_to("/") / "criu-action"
    launcher.chmod(0o777)
    (change,) = plan_install(tmp_path)
    assert change.diff() == f"{launcher}: owner root, mode 0755"
    apply_install([change], tmp_path)
    assert launcher.stat().st_mode & 0o777 == 0o755
    if os.geteuid() == 0:
        os.chown(launcher, 1000, 1000)
        do_install(tmp_path)
        assert launcher.stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_owner_and_mode_of_a_configuration_stay(tmp_path: Path) -> None:
    with_foreign_lines(tmp_path)
    conf = tmp_path / "etc/criu/runc.conf"
    os.chown(conf, 1000, 1001)
    do_install(tmp_path)
    status = conf.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (1000, 1001, 0o640)


def test_directories_are_open_to_others_for_reading_only_whatever_the_umask(tmp_path: Path) -> None:
    for umask in (0o000, 0o077):
        old = os.umask(umask)
        try:
            do_install(tmp_path)
        finally:
            os.umask(old)
        modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_dir()}
        assert modes == {0o755}
        do_uninstall(tmp_path)


def test_action_scripts_of_others_are_told(tmp_path: Path) -> None:
    with_foreign_lines(tmp_path)
    told = [(tmp_path / "etc/criu/runc.conf", "/usr/bin/other")]
    assert install.other_action_scripts(tmp_path) == told
    do_install(tmp_path)
    assert install.other_action_scripts(tmp_path) == told


def test_cuda_plugin_of_criu_is_kept_out(tmp_path: Path) -> None:
    """The launcher's directory has no plugins; what an administrator names holds, and AMD's GPUs keep theirs."""
    conf = tmp_path / "etc/criu/runc.conf"
    do_install(tmp_path)
    assert "libdir" not in conf.read_text()
    with_plugins(tmp_path)
    do_install(tmp_path)
    assert plugin_dir(conf.read_bytes()) == str(LIBEXEC)
    assert not list((tmp_path / LIBEXEC.relative_to("/")).glob("*.so"))
    do_install(tmp_path)
    assert plan_install(tmp_path) == []
    conf.write_bytes(conf.read_bytes() + b"libdir /opt/plugins\n")
    do_install(tmp_path)
    assert plugin_dir(conf.read_bytes()) == "/opt/plugins"
    assert conf.read_text().count("libdir") == 1
    conf.write_text(conf.read_text().replace("libdir /opt/plugins\n", ""))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kfd").touch()
    do_install(tmp_path)
    assert "libdir" not in conf.read_text()
    (tmp_path / "dev/kfd").unlink()
    (tmp_path / "usr/lib/criu/cuda_plugin.so").unlink()
    do_install(tmp_path)
    assert "libdir" not in conf.read_text()


def test_a_damaged_block_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "etc/criu").mkdir(parents=True)
    (tmp_path / "etc/criu/runc.conf").write_text("# BEGIN ocihook\naction-script /x\n")
    before = tree(tmp_path)
    for plan in (plan_install, plan_uninstall):
        with pytest.raises(ConfigError, match=r"runc.conf, line 1"):
            plan(tmp_path)
    assert tree(tmp_path) == before


def test_a_file_system_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "usr").write_text("in the way")
    with pytest.raises(UnsupportedError, match=r"usr/local/libexec/ocihook/criu-action cannot be changed: Not a dir"):
        do_install(tmp_path)


def test_what_a_killed_install_left_half_written_goes(tmp_path: Path) -> None:
    with_foreign_lines(tmp_path)
    before = tree(tmp_path)
    do_install(tmp_path)
    for path in (f"etc/criu/{name}" for name in install.CONF_NAMES):
        (tmp_path / f"{path}.partial").write_text("# BEG")
    (tmp_path / LIBEXEC.relative_to("/") / "criu-action.partial").write_text("#!/bin")
    do_uninstall(tmp_path)
    assert tree(tmp_path) == before


def test_systemd_is_told_at_the_right_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the node itself; its directories are those of a tree here, and systemd is one that can fail."""
    conf, unit = tmp_path / "criu/runc.conf", tmp_path / "units/ocihook.socket"
    calls: list[tuple[str, bool, bool]] = []
    fails = False

    def systemctl(*arguments: str, hint: str) -> None:
        calls.append((arguments[0], conf.exists(), unit.exists()))
        if fails:
            raise UnsupportedError("systemd is ill", hint=hint)

    monkeypatch.setattr(install, "CRIU_CONF_DIR", conf.parent)
    monkeypatch.setattr(install, "UNIT_DIR", unit.parent)
    monkeypatch.setattr(install, "_units", lambda _root: install.unit_templates())
    monkeypatch.setattr(install, "conf_names", lambda _root: ["runc.conf"])
    monkeypatch.setattr(install, "_systemctl", systemctl)
    monkeypatch.setattr(install, "wait_until_unused", lambda **_: calls.append(("wait", conf.exists(), unit.exists())))
    libexec = tmp_path / "libexec"

    apply_install(plan_install(install.NODE, libexec), install.NODE)
    assert calls == [("daemon-reload", True, True), ("enable", True, True), ("start", True, True)]
    calls.clear()
    fails = True
    with pytest.raises(UnsupportedError, match=r"systemd is ill. CRIU no longer calls ocihook"):
        apply_uninstall(plan_uninstall(install.NODE, libexec), install.NODE, libexec)
    assert not conf.exists()  # checkpoints go on without us, whatever systemd does
    fails = False
    apply_uninstall(plan_uninstall(install.NODE, libexec), install.NODE, libexec)
    again = [("wait", False, True), ("disable", False, True)]
    assert calls == [*again, *again, ("daemon-reload", False, False)]
    assert tree(tmp_path) == {}


READ_ONLY = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_read_only_etc_is_a_clear_error_and_no_hindrance_where_nothing_is_to_change(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with_links_and_systemd(root)
    before = tree(root)

    def run(verb: str) -> subprocess.CompletedProcess[str]:
        inside = ["unshare", "--mount", "--propagation", "private", "sh", "-c", READ_ONLY, "sh", str(root / "etc")]
        ocihook = [sys.executable, "-m", "ocihook", verb, "--root", str(root)]
        return subprocess.run([*inside, *ocihook], capture_output=True, text=True, timeout=60, check=False)

    refused = run("install")
    assert (refused.returncode, refused.stdout) == (5, "")
    assert re.match(r"ocihook: error: \S+/etc/\S+ cannot be changed: Read-only file system", refused.stderr)
    assert tree(root) != before  # the launcher, which nothing points to
    assert run("uninstall").returncode == 0
    assert tree(root) == before


@pytest.mark.parametrize(
    ("runc", "crun", "libcriu_reads", "has_crun_conf", "names"),
    [
        (True, None, True, False, ["runc.conf"]),
        (False, None, True, False, ["runc.conf"]),
        (True, (1, 21), False, False, ["runc.conf", "default.conf"]),
        (True, (1, 28), False, False, ["runc.conf", "default.conf"]),
        (True, (1, 28), None, False, ["runc.conf", "default.conf"]),
        (True, (1, 28), True, False, ["runc.conf"]),
        (True, (1, 28), True, True, ["runc.conf", "crun.conf"]),
        (False, (1, 28), True, False, ["runc.conf"]),
        (False, (1, 28), True, True, ["crun.conf"]),
        (False, (1, 21), True, True, ["default.conf"]),
    ],
)
def test_each_runtime_gets_the_file_that_it_reads(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    runc: bool,
    crun: tuple[int, ...] | None,
    libcriu_reads: bool | None,
    has_crun_conf: bool,
    names: list[str],
) -> None:
    programs = {
        "runc": Program("runc", "/usr/bin/runc", (1, 3)) if runc else None,
        "crun": Program("crun", "/usr/bin/crun", crun) if crun else None,
    }
    monkeypatch.setattr(install, "find_program", programs.get)
    monkeypatch.setattr(version, "libcriu_reads_conf", lambda _root: libcriu_reads)
    monkeypatch.setattr(install, "CRIU_CONF_DIR", tmp_path)
    if has_crun_conf:
        (tmp_path / "crun.conf").touch()
    assert install.conf_names(install.NODE) == names


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ([], ["runc.conf", "default.conf"]),
        (["etc/criu/crun.conf"], ["runc.conf", "crun.conf", "default.conf"]),
        (["usr/sbin/runc"], ["runc.conf"]),
        (["usr/sbin/runc", "usr/bin/crun"], ["runc.conf", "default.conf"]),  # no libcriu
        (["usr/sbin/runc", "usr/bin/crun", "usr/lib/x86_64-linux-gnu/libcriu.so.2"], ["runc.conf"]),
        (["usr/local/bin/crun", "usr/bin/crun", "usr/lib64/libcriu.so.2"], ["default.conf"]),  # of no package
        (["usr/bin/crun", "usr/lib64/libcriu.so.2", "etc/criu/crun.conf"], ["crun.conf"]),
    ],
)
def test_what_an_image_holds_is_found_without_running_it(tmp_path: Path, files: list[str], names: list[str]) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"criu_set_config_file\0" if "libcriu" in file else b"")
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "var/lib/dpkg/status").write_text(
        "Package: crun-doc\nStatus: install ok installed\nVersion: 9.9\n\n"
        "Package: crun\nStatus: install ok installed\nPriority: optional\nVersion: 1:1.28-1\n\n"
    )
    assert install.conf_names(tmp_path) == names
