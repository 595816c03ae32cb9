"""Installing and uninstalling in a file system tree: what was there before is there afterwards, byte for byte."""

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ocihook.criu.version import Program
from ocihook.errors import ConfigError, UnsupportedError
from ocihook.ops import install
from ocihook.ops.install import LIBEXEC, apply_install, apply_uninstall, plan_install, plan_uninstall

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


def with_links_and_systemd(root: Path) -> None:
    (root / "etc/criu").mkdir(parents=True)
    (root / "srv").mkdir()
    (root / "srv/runc.conf").write_text("ghost-limit 10M\n")
    (root / "etc/criu/runc.conf").symlink_to("../../srv/runc.conf")
    (root / "usr/lib/systemd/system").mkdir(parents=True)
    (root / "etc/systemd/system/sockets.target.wants").mkdir(parents=True)
    (root / "etc/systemd/system/sockets.target.wants/other.socket").symlink_to("/x")


TREES = pytest.mark.parametrize("prepare", [empty, with_foreign_lines, with_links_and_systemd])


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
    after = {name: value for name, value in tree(tmp_path).items() if name in before or value[1] is not None}
    assert after == before
    assert plan_uninstall(tmp_path) == []
    do_uninstall(tmp_path)


def test_what_is_installed_runs_the_hook(tmp_path: Path) -> None:
    with_links_and_systemd(tmp_path)
    do_install(tmp_path)
    launcher = tmp_path / LIBEXEC.relative_to("/") / "criu-action"
    assert launcher.stat().st_mode & 0o777 == 0o755
    for stage in ("network-lock", "self-test"):
        done = subprocess.run(
            [launcher], env={"CRTOOLS_SCRIPT_ACTION": stage}, capture_output=True, text=True, timeout=30, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # Through a link, the file it leads to is edited, and the link stays.
    assert (tmp_path / "etc/criu/runc.conf").is_symlink()
    assert f"action-script {LIBEXEC}/criu-action" in (tmp_path / "srv/runc.conf").read_text()
    assert "@" not in launcher.read_text()
    units = tmp_path / "etc/systemd/system"
    assert "ListenSequentialPacket=/run/ocihook/agent.sock" in (units / "ocihook.socket").read_text()
    assert "-m ocihook agent" in (units / "ocihook.service").read_text()
    assert os.readlink(units / "sockets.target.wants/ocihook.socket") == "/etc/systemd/system/ocihook.socket"


@TREES
def test_interrupted_anywhere_it_can_be_repeated_or_taken_back(tmp_path: Path, prepare: Callable[[Path], None]) -> None:
    for number in range(8):
        root = tmp_path / str(number)
        root.mkdir()
        prepare(root)
        before = tree(root)
        changes = plan_install(root)
        with pytest.MonkeyPatch.context() as patch:
            left = iter(range(number))
            apply = install._apply

            def apply_some(change: install.Change, left: object = left, apply: object = apply) -> None:
                next(left)  # type: ignore[call-overload] # StopIteration: killed here
                apply(change)  # type: ignore[operator]

            patch.setattr(install, "_apply", apply_some)
            if number < len(changes):
                with pytest.raises((StopIteration, RuntimeError)):
                    apply_install(changes, root)
        do_install(root)
        assert plan_install(root) == []
        do_uninstall(root)
        after = {name: value for name, value in tree(root).items() if name in before or value[1] is not None}
        assert after == before


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
    with pytest.raises(UnsupportedError, match=r"cannot be changed: (Not a directory|File exists)"):
        do_install(tmp_path)


@pytest.mark.parametrize(
    ("runc", "crun", "criu", "has_crun_conf", "names"),
    [
        (True, None, (4, 2), False, ["runc.conf"]),
        (False, None, (4, 2), False, ["runc.conf"]),
        (True, (1, 21), (4, 1, 1), False, ["runc.conf", "default.conf"]),
        (True, (1, 28), (4, 1, 1), False, ["runc.conf", "default.conf"]),
        (True, (1, 28), (4, 2, 1), False, ["runc.conf"]),
        (True, (1, 28), (4, 2, 1), True, ["runc.conf", "crun.conf"]),
        (False, (1, 28), (4, 2, 1), False, ["runc.conf"]),
        (False, (1, 28), (4, 2, 1), True, ["crun.conf"]),
        (False, (1, 21), (4, 1, 1), True, ["default.conf"]),
    ],
)
def test_each_runtime_gets_the_file_that_it_reads(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    *,
    runc: bool,
    crun: tuple[int, ...] | None,
    criu: tuple[int, ...],
    has_crun_conf: bool,
    names: list[str],
) -> None:
    programs = {
        "runc": install_program("runc", (1, 3)) if runc else None,
        "crun": install_program("crun", crun) if crun else None,
        "criu": install_program("criu", criu),
    }
    monkeypatch.setattr(install, "find_program", programs.get)
    monkeypatch.setattr(install, "CRIU_CONF_DIR", tmp_path)
    if has_crun_conf:
        (tmp_path / "crun.conf").touch()
    assert install.conf_names(Path("/")) == names


def install_program(name: str, version: tuple[int, ...]) -> Program:
    return Program(name, f"/usr/bin/{name}", version)
