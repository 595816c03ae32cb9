"""Each thing that would break a checkpoint is found, and comes with a remedy."""

import mmap
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ocihook import wire
from ocihook.config import Settings
from ocihook.container.running import RunningContainer
from ocihook.criu import files as criu_files
from ocihook.criu import plugin, version
from ocihook.criu.version import Program
from ocihook.gpu import library, preflight
from ocihook.gpu.driver import CudaState
from ocihook.gpu.signs import Signs
from ocihook.linux.open_files import mapped_files, open_files
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process
from ocihook.node import install
from ocihook.node.doctor import container, machine, node, run
from ocihook.node.doctor.left_locks import LeftLock
from ocihook.node.doctor.run import check_node, repair, run_check
from ocihook.node.install import apply_install, plan_install
from ocihook.preflight.finding import Finding, Repair, Status
from ocihook.preflight.observation import Observation, ProcessSeen
from ocihook.session.journal import Journal
from ocihook.stages.recover import recover


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Program]:
    """The programs of a node, to be filled in; its /etc/criu is tmp_path."""
    found: dict[str, Program] = {}
    for module in (criu_files, machine, node):
        monkeypatch.setattr(module, "find_program", found.get)
    monkeypatch.setattr(criu_files, "find_path", found.get)
    for module in (criu_files, node):
        monkeypatch.setattr(module, "CRIU_CONF_DIR", tmp_path)
    monkeypatch.setattr(node, "_ETC", tmp_path)
    set_libcriu(monkeypatch, reads_conf=True)
    return found


def set_libcriu(monkeypatch: pytest.MonkeyPatch, *, reads_conf: bool | None) -> None:
    monkeypatch.setattr(version, "libcriu_reads_conf", lambda *_: reads_conf)
    monkeypatch.setattr(node, "libcriu_reads_conf", lambda *_: reads_conf)


def put(programs: dict[str, Program], name: str, *version: int) -> None:
    programs[name] = Program(name, f"/usr/bin/{name}", version)


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    ("version", "answer", "status"),
    [
        (None, "", Status.FAIL),
        ((3, 17, 1), "Looks good.", Status.FAIL),
        ((3, 19), "Looks good.", Status.WARN),
        ((4, 1, 1), "Looks good.", Status.OK),
        ((4, 1, 1), "Error (criu/x.c:1): no luck", Status.FAIL),
        ((4, 1, 1), "Error (criu/tun.c:85): tun: Unable to create tun\nError (criu/x.c:1): no luck", Status.FAIL),
        ((4, 2, 1), "Looks good.", Status.OK),
    ],
)
def test_criu(
    programs: dict[str, Program],
    monkeypatch: pytest.MonkeyPatch,
    version: tuple[int, ...] | None,
    answer: str,
    status: Status,
) -> None:
    monkeypatch.setattr(node, "run_output", lambda *_: answer)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    if version:
        put(programs, "criu", *version)
    finding = only(node._check_criu())
    assert finding.status is status
    assert finding.remedy or status is Status.OK
    assert "tun" not in finding.detail


@pytest.mark.parametrize(
    ("version", "status", "word"),
    [
        ((1, 7, 24), Status.WARN, "no CheckpointContainer"),
        ((2, 0, 5), Status.WARN, "cannot restore"),
        ((2, 1, 9), Status.OK, "2.1.9"),
        ((2, 2, 6), Status.OK, "2.2.6"),
        ((2, 2, 7), Status.WARN, "switched on"),
        ((2, 3, 3), Status.OK, "2.3.3"),
        ((2, 3, 4), Status.WARN, "switched on"),
        ((2, 4, 0), Status.WARN, "no longer restores"),
    ],
)
def test_containerd(programs: dict[str, Program], version: tuple[int, ...], status: Status, word: str) -> None:
    put(programs, "containerd", *version)
    finding = only(node._check_engines())
    assert finding.status is status
    assert word in finding.detail


@pytest.mark.parametrize(
    ("dump", "status"),
    [("", Status.WARN), ("x = false", Status.WARN), ("{} = false", Status.WARN), ("  {} = true\n", Status.OK)],
)
def test_containerd_whose_restore_is_switched_on(
    programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch, dump: str, status: Status
) -> None:
    put(programs, "containerd", 2, 3, 4)
    monkeypatch.setattr(node, "run_output", lambda *_: dump.format("enable_experimental_restore_via_create"))
    assert only(node._check_engines()).status is status


def test_containerd_whose_criu_is_switched_off(programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch) -> None:
    put(programs, "containerd", 2, 1, 9)
    for value, status in (("true", Status.OK), ("false", Status.WARN)):
        monkeypatch.setattr(node, "run_output", lambda *_, value=value: f"    enable_criu = {value}\n")
        finding = only(node._check_engines())
        assert (finding.status, "enable_criu" in finding.remedy) == (status, status is Status.WARN)


@pytest.mark.parametrize(
    ("level", "status", "words"),
    [
        ("checkpoint_restore", Status.OK, ""),
        ("checkpoint_only", Status.WARN, "not restore"),
        ("none", Status.WARN, "switches checkpoints off"),
    ],
)
def test_the_level_of_crio(
    programs: dict[str, Program], tmp_path: Path, level: str, status: Status, words: str
) -> None:
    put(programs, "crio", 1, 38)
    (tmp_path / "crio/crio.conf.d").mkdir(parents=True)
    text = f'[crio.checkpoint_restore]\ncontainer_level_enabled = "{level}"\n'
    (tmp_path / "crio/crio.conf.d/10-level.conf").write_text(text)
    finding = only(node._check_engines())
    assert (finding.status, words in finding.detail) == (status, True)
    assert ("container_level_enabled" in finding.remedy) is (status is Status.WARN)


@pytest.mark.parametrize(
    ("version", "status"),
    [((1, 28), Status.OK), ((1, 29), Status.WARN), ((1, 29, 0), Status.WARN), ((1, 29, 1), Status.OK)],
)
def test_a_crun_with_regressions(
    programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], status: Status
) -> None:
    put(programs, "crun", *version)
    monkeypatch.setattr(node, "run_output", lambda *_: "+CRIU")
    monkeypatch.setattr(node, "libcriu_reads_conf", lambda: True)
    assert only(node._check_runtimes()).status is status


@pytest.mark.parametrize(
    ("release", "criu", "is_found"),
    [("7.0.9", (4, 2), False), ("7.1.0-arch1", (4, 2), True), ("7.2.1", (4, 1, 1), True), ("7.1.3", (4, 3), False)],
)
def test_a_kernel_that_is_too_new_for_criu(
    programs: dict[str, Program],
    monkeypatch: pytest.MonkeyPatch,
    release: str,
    criu: tuple[int, ...],
    *,
    is_found: bool,
) -> None:
    put(programs, "criu", *criu)
    monkeypatch.setattr("platform.release", lambda: release)
    assert any(finding.check == "kernel-7.1" for finding in machine._check_kernel()) is is_found


def test_crio_whose_checkpoints_are_switched_off(programs: dict[str, Program], tmp_path: Path) -> None:
    put(programs, "crio", 1, 34)
    (tmp_path / "crio/crio.conf.d").mkdir(parents=True)
    (tmp_path / "crio/crio.conf").write_text("[crio.runtime]\n# enable_criu_support = false\n")
    assert only(node._check_engines()).status is Status.OK
    (tmp_path / "crio/crio.conf").write_text("[crio.runtime]\nenable_criu_support = false\n")
    assert "crio.conf switches" in only(node._check_engines()).detail
    (tmp_path / "crio/crio.conf.d/10-on").write_text("[crio.runtime]\nenable_criu_support = true\n")
    assert only(node._check_engines()).status is Status.OK


def test_crio_that_checks_signatures_restores_nothing(programs: dict[str, Program], tmp_path: Path) -> None:
    put(programs, "crio", 1, 37)
    (tmp_path / "crio/crio.conf.d").mkdir(parents=True)
    (tmp_path / "crio/crio.conf.d/10-crio.conf").write_text(
        '[crio.image]\nsignature_policy = "/etc/crio/policy.json"\n'
    )
    finding = only(node._check_engines())
    assert finding.status is Status.WARN
    assert "10-crio.conf sets signature_policy" in finding.detail
    put(programs, "crio", 1, 30)
    assert only(node._check_engines()).status is Status.OK
    put(programs, "crio", 1, 37)
    (tmp_path / "crio/crio.conf.d/20-ours.conf").write_text('[crio.image]\nsignature_policy = ""\n')
    assert only(node._check_engines()).status is Status.OK


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ('container_annotations = ["ocihook.io/*"]', False),
        ('# pod_annotations = ["*"]', False),
        ('pod_annotations = ["a", "*"]', True),
        ("container_annotations = ['org.criu.config']", True),
        ('allowed_annotations = [\n  "io.x",\n  "org.criu.config",\n]', True),
    ],
)
def test_engines_that_let_containers_choose_a_configuration(
    programs: dict[str, Program], tmp_path: Path, line: str, *, is_told: bool
) -> None:
    (tmp_path / "containerd").mkdir()
    (tmp_path / "containerd/config.toml").write_text(f"version = 3\n{line}\n")
    findings = list(node._check_annotations())
    assert [finding.status for finding in findings] == [Status.WARN] * is_told


@pytest.mark.parametrize(
    ("reads_conf", "output", "status", "word"),
    [
        (True, "+CRIU", Status.OK, "1.28"),
        (False, "+CRIU", Status.OK, "1.28"),
        (None, "+CRIU", Status.WARN, "libcriu.so.2 is not there"),
        (True, "+CAP", Status.WARN, "built without CRIU"),
    ],
)
def test_crun_needs_libcriu(
    programs: dict[str, Program],
    monkeypatch: pytest.MonkeyPatch,
    *,
    reads_conf: bool | None,
    output: str,
    status: Status,
    word: str,
) -> None:
    put(programs, "crun", 1, 28)
    set_libcriu(monkeypatch, reads_conf=reads_conf)
    monkeypatch.setattr(node, "run_output", lambda *_: output)
    finding = only(node._check_runtimes())
    assert (finding.status, word in finding.detail) == (status, True)


def test_block_must_be_in_the_file_that_the_runtime_reads(programs: dict[str, Program], tmp_path: Path) -> None:
    launcher = tmp_path / "criu-action"
    launcher.write_text("#!/bin/sh\nexit 0\n")
    launcher.chmod(0o755)
    put(programs, "criu", 4, 2, 1)
    put(programs, "crun", 1, 28)
    block = f"# BEGIN ocihook\naction-script {launcher}\n# END ocihook\n"
    (tmp_path / "runc.conf").write_text(block)
    assert only(node._check_installation()).status is Status.OK
    (tmp_path / "crun.conf").write_text("")  # hides runc.conf from crun
    assert only(node._check_installation()).status is Status.FAIL
    (tmp_path / "crun.conf").write_text(block)
    assert only(node._check_installation()).status is Status.OK
    put(programs, "crun", 1, 21)  # reads neither
    assert only(node._check_installation()).status is Status.FAIL
    (tmp_path / "default.conf").write_text(block)
    assert only(node._check_installation()).status is Status.OK
    (tmp_path / "default.conf").write_text("# BEGIN ocihook\n")
    assert "damaged" in only(node._check_installation()).detail


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.chmod(0o777), "can be changed by others"),
        (lambda path: path.chmod(0o644), "cannot be run"),
        (lambda path: path.write_text("#!/bin/sh\necho no >&2; exit 3\n"), "fails: no"),
        (lambda path: path.write_text("#!/no/such/interpreter\n"), "cannot be run"),
    ],
)
def test_launcher(programs: dict[str, Program], tmp_path: Path, spoil: Callable[[Path], None], word: str) -> None:
    launcher = tmp_path / "criu-action"
    launcher.write_text("#!/bin/sh\nexit 0\n")
    launcher.chmod(0o755)
    put(programs, "runc", 1, 3)
    (tmp_path / "runc.conf").write_text(f"# BEGIN ocihook\naction-script {launcher}\n# END ocihook\n")
    spoil(launcher)
    finding = only(node._check_installation())
    assert (finding.status, finding.remedy) == (Status.FAIL, "ocihook install")
    assert word in finding.detail


def test_a_launcher_starts_and_is_timed(programs: dict[str, Program], tmp_path: Path) -> None:
    put_launcher(programs, tmp_path, tmp_path, tmp_path)
    finding = only(node._check_installation())
    assert finding.status is Status.OK
    assert re.search(r"criu-action, starts in \d+ ms$", finding.detail)


@pytest.mark.parametrize("place", ["lib", "site", "site/deep"])
def test_what_the_launcher_runs_must_be_roots(programs: dict[str, Program], tmp_path: Path, place: str) -> None:
    """Root runs the interpreter and the package that the launcher names; who can write there is root."""
    (tmp_path / "lib").mkdir(mode=0o755)
    (tmp_path / "site/deep").mkdir(mode=0o755, parents=True)
    put_launcher(programs, tmp_path, tmp_path / "lib", tmp_path / "site/deep")
    (tmp_path / place).chmod(0o777)
    finding = only(node._check_installation())
    assert finding.status is Status.WARN
    assert finding.detail.startswith(f"{tmp_path / place} can be changed by others")
    (tmp_path / place).chmod(0o1777)  # as /tmp: what is in it stays its owner's
    assert only(node._check_installation()).status is Status.OK


def put_launcher(programs: dict[str, Program], conf_dir: Path, directory: Path, site: Path) -> None:
    """Install a launcher for runc that runs code of `site`."""
    launcher = directory / "criu-action"
    launcher.write_text(f"#!/bin/sh\nexec test -d '{site}'\n")
    launcher.chmod(0o755)
    put(programs, "runc", 1, 3)
    (conf_dir / "runc.conf").write_text(f"# BEGIN ocihook\naction-script {launcher}\n# END ocihook\n")


@pytest.mark.parametrize(
    ("states", "status", "word"),
    [
        ({"socket": "active", "service": "inactive"}, Status.OK, "systemd starts it"),
        ({"socket": "active", "service": "active", "pid": "1"}, Status.OK, "systemd starts it"),
        ({"socket": "active", "service": "inactive", "file": ""}, Status.WARN, "agent.sock is missing"),
        ({"socket": "active", "service": "active", "pid": "2"}, Status.WARN, "may not make all system calls"),
        ({"socket": "inactive", "service": "inactive", "loaded": "loaded"}, Status.WARN, "socket is inactive"),
        ({"socket": "failed", "service": "failed"}, Status.WARN, "service has failed"),
        ({"socket": "", "service": ""}, Status.WARN, "socket is unknown"),
    ],
)
def test_agent_under_systemd(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, states: dict[str, str], status: Status, word: str
) -> None:
    monkeypatch.setattr(node, "_SYSTEMD", tmp_path)
    monkeypatch.setattr(wire, "RUNTIME_DIR", str(tmp_path))
    if "file" not in states:
        (tmp_path / wire.SOCKET_NAME).touch()

    def systemctl(*command: str) -> str:
        if "--property=MainPID" in command:
            return states.get("pid", "0") + "\n"
        return states.get("loaded" if command[1] == "show" else command[-1].split(".")[1], "") + "\n"

    monkeypatch.setattr(node, "status_fields", lambda pid: {"Seccomp": "2" if pid == 2 else "0"})
    monkeypatch.setattr(node, "run_output", systemctl)
    finding = only(node._check_agent())
    assert (finding.status, word in finding.detail) == (status, True)
    if "inactive" in word:  # `ocihook install` has nothing to change where its units are there
        assert (finding.remedy, finding.repair) == ("systemctl enable --now ocihook.socket", Repair.LISTEN)
    if "unknown" in word:
        assert (finding.remedy, finding.repair) == ("ocihook install", Repair.INSTALL)
    monkeypatch.setattr(node, "_SYSTEMD", tmp_path / "none")
    assert only(node._check_agent()).detail == "no systemd: the hook starts it"


@pytest.mark.parametrize(
    ("held", "seccomp", "status", "word"),
    [
        ("000001ffffffffff", 0, Status.OK, "root"),
        ("000001ffffffffff", 2, Status.WARN, "seccomp"),
        ("00000000a80425fb", 0, Status.FAIL, "CAP_NET_ADMIN, CAP_SYS_PTRACE, CAP_SYS_ADMIN"),  # podman's default
    ],
)
def test_root_in_a_container_is_not_root(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, held: str, seccomp: int, status: Status, word: str
) -> None:
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{held}\nSeccomp:\t{seccomp}\n")
    monkeypatch.setattr(machine, "_STATUS", tmp_path / "status")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    finding = only(machine._check_privileges())
    assert (finding.status, word in finding.detail) == (status, True)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert only(machine._check_privileges()).remedy == "run `sudo ocihook doctor`"


@pytest.mark.parametrize(
    ("release", "status"), [("6.18.4-x", Status.OK), ("5.9-rc1", Status.OK), ("5.4.0", Status.FAIL)]
)
def test_kernel(monkeypatch: pytest.MonkeyPatch, release: str, status: Status) -> None:
    monkeypatch.setattr(machine, "hides_socket_options", lambda: False)
    monkeypatch.setattr("platform.release", lambda: release)
    assert only(machine._check_kernel()).status is status


def test_selinux_is_mentioned_where_it_enforces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_SELINUX", tmp_path / "enforce")
    assert list(machine._check_selinux()) == []
    (tmp_path / "enforce").write_text("0")
    assert list(machine._check_selinux()) == []
    (tmp_path / "enforce").write_text("1")
    assert "ausearch" in only(machine._check_selinux()).detail


def test_plugin_is_looked_for_where_criu_does(
    programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/cuda_plugin.so").touch()
    monkeypatch.setattr(plugin, "_DEFAULT_DIRS", (str(tmp_path / "plugins"),))
    assert node._cuda_plugin() is None  # no runtime, nothing that would load it
    put(programs, "runc", 1, 3)
    assert node._cuda_plugin() == tmp_path / "plugins/cuda_plugin.so"
    (tmp_path / "runc.conf").write_text("libdir /var/empty\n")
    assert node._cuda_plugin() is None
    put(programs, "crun", 1, 21)  # does not read runc.conf
    assert node._cuda_plugin() == tmp_path / "plugins/cuda_plugin.so"
    (tmp_path / "default.conf").write_text("libdir=/var/empty\n")
    assert node._cuda_plugin() is None


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("pod_annotations = []\n container_annotations = ['ocihook.io/*']", True),
        ("pod_annotations = ['x.io/*', 'ocihook.io/*']", False),
        ('pod_annotations = ["*"]', False),
    ],
)
def test_containerd_that_passes_no_annotations(
    programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch, line: str, *, is_told: bool
) -> None:
    assert not list(node._check_annotations())
    put(programs, "containerd", 2, 1, 9)
    monkeypatch.setattr(node, "run_output", lambda *_: f"[plugins]\n  {line}\n")
    assert [finding.status for finding in node._check_annotations()] == [Status.SKIP] * is_told


def test_what_cannot_be_read_is_told_and_stops_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def _check_some_thing() -> Iterator[Finding]:
        yield from ()
        raise PermissionError(13, "Permission denied", "/x")

    finding = only(iter(run_check(_check_some_thing)))
    assert finding[:2] == ("some thing", Status.WARN)
    assert finding.detail == "could not be checked: /x: Permission denied"


@pytest.mark.parametrize(
    ("criu", "name", "is_told"),
    [
        ((4, 1, 1), "runc.conf", True),
        ((4, 2), "crun.conf", True),
        ((4, 2, 1), "runc.conf", False),
        ((4, 1, 1), "default.conf", False),
    ],
)
def test_network_lock_crashes_older_criu_when_a_runtime_names_it(
    programs: dict[str, Program], tmp_path: Path, criu: tuple[int, ...], name: str, *, is_told: bool
) -> None:
    put(programs, "criu", *criu)
    (tmp_path / name).write_text("network-lock skip\n")
    assert [finding.status for finding in node._check_criu_configuration()] == [Status.FAIL] * is_told


@pytest.mark.parametrize("option", ["stream", "lazy-pages", "leave-running", "mntns-compat-mode", "log-file x"])
def test_harmful_options(programs: dict[str, Program], tmp_path: Path, option: str) -> None:
    (tmp_path / "runc.conf").write_text(f"tcp-established\n{option}\n")
    finding = only(node._check_criu_configuration())
    assert finding.status is Status.FAIL
    assert option.partition(" ")[0] in finding.detail


def test_tracking_that_the_kernel_cannot_do_is_an_error_and_mended(
    programs: dict[str, Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours goes, and nothing else; what others have written is theirs."""
    assert list(node.check_tracking(works=False)) == []
    assert "runtime handler" in only(node.check_tracking(works=True)).detail
    monkeypatch.setattr(install, "CRIU_CONF_DIR", Path("/"))
    monkeypatch.setattr(install, "conf_names", lambda _root: ["runc.conf"])
    monkeypatch.setattr("ocihook.linux.soft_dirty.works", lambda: False)
    apply_install(plan_install(tmp_path, track_memory=True), tmp_path)
    conf = tmp_path / "runc.conf"
    assert "CRIU tracks it by runc.conf" in only(node.check_tracking(works=True)).detail
    finding = only(node.check_tracking(works=False))
    assert (finding.status, finding.repair) == (Status.FAIL, Repair.INSTALL)
    assert repair([finding], list, root=tmp_path) == [f"wrote {conf}"]
    assert list(node.check_tracking(works=False)) == []
    assert "action-script" in conf.read_text()
    conf.write_text("track-mem\n")
    finding = only(node.check_tracking(works=False))
    assert (finding.status, finding.repair, finding.remedy) == (
        Status.FAIL,
        Repair.NONE,
        f"remove track-mem from {conf}",
    )


def test_harmless_configuration_and_foreign_scripts(programs: dict[str, Program], tmp_path: Path) -> None:
    (tmp_path / "runc.conf").write_text("tcp-established\nmanage-cgroups=ignore\naction-script /usr/bin/env\n")
    finding = only(node._check_criu_configuration())
    assert finding.status is Status.OK
    assert "/usr/bin/env" in finding.detail
    (tmp_path / "runc.conf").write_text("# manage-cgroups ignore\nmanage-cgroups=ignore\nverbosity=4\nverbosity\n")
    assert list(node._check_criu_configuration()) == []
    (tmp_path / "runc.conf").write_text("manage-cgroups\tignore\n")
    assert only(node._check_criu_configuration()).remedy == "write manage-cgroups=ignore"


def test_a_line_that_criu_refuses_is_named(programs: dict[str, Program], tmp_path: Path) -> None:
    put(programs, "runc", 1, 3)
    (tmp_path / "runc.conf").write_text("# ours\ntcp-closed\nghost-limit 5M\n")
    finding = only(node._check_criu_configuration())
    assert finding.status is Status.FAIL
    assert f"{tmp_path}/runc.conf, line 2: CRIU has no option `tcp-closed`" in finding.detail
    assert finding.remedy.startswith("did you mean tcp-close?")
    (tmp_path / "crun.conf").write_text("tcp-closed\n")  # which only crun would have CRIU read
    (tmp_path / "runc.conf").unlink()
    assert only(node._check_criu_configuration()).status is Status.WARN


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda _: None, "No such file"),
        (lambda path: path.write_text(""), "is not executable"),
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: path.touch(mode=0o755), ""),
    ],
)
def test_action_scripts_of_others_must_be_programs(
    programs: dict[str, Program], tmp_path: Path, make: Callable[[Path], None], word: str
) -> None:
    script = tmp_path / "script"
    make(script)
    (tmp_path / "default.conf").write_text(
        f'# BEGIN ocihook\naction-script /gone\n# END ocihook\naction-script "{script}"'
    )
    found = [f for f in node._check_criu_configuration() if f.check == "action script"]
    assert [f.status for f in found] == [Status.FAIL] * bool(word)  # ours is another check's
    assert all(word in f.detail and f"default.conf, line 4: the action script {script}" in f.detail for f in found)


def test_what_fails_on_the_node_fails_for_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = RunningContainer("0717d827f3ce", "runc", os.getpid(), "", {}, {})
    monkeypatch.setattr(run, "find_container", lambda _name: found)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(run, "_run_all", lambda checks: [f for check in checks for f in run_check(check)])
    broken = Finding("configuration", Status.FAIL, "config.toml is not TOML", "correct the file")
    monkeypatch.setattr(node, "CHECKS", (lambda: iter([broken]),))
    monkeypatch.setattr(machine, "CHECKS", ())
    monkeypatch.setattr(run, "CHECKS", ())
    findings = run.check_container("0717")
    assert broken in findings
    assert "size" in {finding.check for finding in findings}


@pytest.mark.parametrize("is_container", [True, False])
def test_a_process_cannot_be_dumped_without_criu(
    programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch, *, is_container: bool
) -> None:
    found = RunningContainer("0717d827f3ce", "runc", os.getpid(), "", {}, {})
    monkeypatch.setattr(run, "container_of", lambda _pid: found if is_container else None)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(run, "find_program", programs.get)
    monkeypatch.setattr(run, "CHECKS", ())
    assert Finding(
        "criu", Status.FAIL, "not installed", "install CRIU 4.1.1 or later (Debian 13, Fedora 42)"
    ) in run.check_process(os.getpid())


def test_nothing_installed(programs: dict[str, Program]) -> None:
    assert only(node._check_runtimes()).status is Status.FAIL
    assert only(node._check_engines()).status is Status.WARN


def test_every_finding_that_is_not_ok_has_a_remedy() -> None:
    findings = check_node()
    assert {finding.check for finding in findings} >= {"kernel", "criu", "configuration", "cgroups", "memory"}
    assert all(finding.remedy for finding in findings if finding.status in (Status.WARN, Status.FAIL))


@pytest.mark.parametrize(
    ("hides", "criu", "is_told"), [(True, (4, 1, 1), True), (True, (4, 2), False), (False, (4, 1, 1), False)]
)
def test_criu_that_is_too_old_for_the_kernel(
    programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch, *, hides: bool, criu: tuple[int, ...], is_told: bool
) -> None:
    monkeypatch.setattr(machine, "hides_socket_options", lambda: hides)
    put(programs, "criu", *criu)
    found = [finding for finding in machine._check_kernel() if finding.check == "kernel-6.16"]
    assert [finding.status for finding in found] == [Status.WARN] * is_told


@pytest.mark.parametrize(
    ("text", "statuses"),
    [
        ("runtimeRequestTimeout: 15m0s\n", [Status.OK]),
        ("runtimeRequestTimeout: 2m\n", [Status.WARN]),
        ("kind: KubeletConfiguration\n", [Status.WARN]),
        ("runtimeRequestTimeout: 1h\nfeatureGates:\n  ContainerCheckpoint: false\n", [Status.WARN, Status.OK]),
    ],
)
def test_kubelet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, statuses: list[Status]) -> None:
    monkeypatch.setattr(node, "_KUBELET_CONFIG", tmp_path / "config.yaml")
    assert list(node._check_kubelet()) == []
    (tmp_path / "config.yaml").write_text(text)
    assert [finding.status for finding in node._check_kubelet()] == statuses


@pytest.mark.parametrize(
    ("config", "has_cdi", "status"),
    [
        ('[nvidia-container-runtime]\nmode = "legacy"\n', True, Status.WARN),
        ('[nvidia-container-runtime]\nmode = "auto"\n', False, Status.WARN),
        ('[nvidia-container-runtime]\nmode = "cdi"\n', True, Status.OK),
    ],
)
def test_nvidias_hook_mounts_where_there_is_no_cdi(
    programs: dict[str, Program],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    config: str,
    status: Status,
    *,
    has_cdi: bool,
) -> None:
    assert list(node._check_nvidia_runtime()) == []
    (tmp_path / "nvidia-container-runtime").mkdir()
    (tmp_path / "nvidia-container-runtime/config.toml").write_text(config)
    (tmp_path / "cdi").mkdir()
    monkeypatch.setattr(node, "CDI_DIRS", (tmp_path / "cdi",))
    if has_cdi:
        (tmp_path / "cdi/nvidia.yaml").touch()
    assert only(node._check_nvidia_runtime()).status is status


def test_a_plugin_newer_than_criu(
    programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cuda_plugin.so").write_bytes(b"\0check_and_remove_inventory_plugin\0")
    (tmp_path / "criu").write_bytes(b"\0nothing of it\0")
    monkeypatch.setattr(plugin, "_DEFAULT_DIRS", (str(tmp_path),))
    monkeypatch.setattr(node, "_NVIDIA", tmp_path)
    put(programs, "runc", 1, 3)
    programs["criu"] = Program("criu", str(tmp_path / "criu"), (4, 0))
    assert only(node._check_cuda_plugin()).status is Status.FAIL
    (tmp_path / "criu").write_bytes((tmp_path / "cuda_plugin.so").read_bytes())
    finding = only(node._check_cuda_plugin())
    assert finding.status is Status.FAIL
    assert "those of CUDA processes are refused" in finding.detail
    assert finding.repair is Repair.INSTALL
    (tmp_path / "runc.conf").write_text("libdir /var/empty\n")
    finding = only(node._check_cuda_plugin())
    assert finding.status is Status.OK
    assert f"{tmp_path}/cuda_plugin.so is kept out by CRIU's libdir" in finding.detail


def test_network_lock(programs: dict[str, Program], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "left_locks", lambda *_: [])
    monkeypatch.setattr(machine, "SBIN", str(tmp_path))
    assert only(machine._check_network_lock()).check == "no-network-lock"
    (tmp_path / "iptables-restore").touch(mode=0o755)
    assert only(machine._check_network_lock()).status is Status.OK
    (tmp_path / "default.conf").write_text("network-lock nftables\n")
    monkeypatch.setattr(machine, "has_nftables", lambda: False)
    assert only(machine._check_network_lock()).remedy == "install nftables"
    monkeypatch.setattr(machine, "left_locks", lambda *_: [LeftLock("chain CRIU", True, 0, "iptables -F CRIU")])
    monkeypatch.setattr(machine, "has_nftables", lambda: True)
    assert only(machine._check_network_lock()).check == "network-lock-left"


def test_archives_that_nobody_removes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_KUBELET_ARCHIVES", tmp_path / "none")
    assert list(machine._check_archives()) == []
    monkeypatch.setattr(machine, "_KUBELET_ARCHIVES", tmp_path)
    monkeypatch.setattr(machine, "load_settings", Settings)
    tmp_path.chmod(0o700)
    assert only(machine._check_archives()).status is Status.OK
    for number in range(21):
        (tmp_path / f"checkpoint-{number}.tar").touch()
    assert "which nobody removes" in only(machine._check_archives()).detail
    monkeypatch.setattr(machine, "load_settings", lambda: Settings(archive_dir=str(tmp_path)))
    assert only(machine._check_archives()).status is Status.OK
    tmp_path.chmod(0o755)
    assert next(machine._check_archives()).remedy == f"chmod 700 {tmp_path}"


def test_a_session_left_behind_is_repaired(tmp_path: Path) -> None:
    Journal.create(tmp_path, Process(os.getpid(), 1))  # of an earlier process with this pid
    findings = [finding for finding in node._check_sessions(tmp_path) if finding.check == "sessions"]
    assert [(finding.remedy, finding.repair) for finding in findings] == [("ocihook recover", Repair.RECOVER)]
    (done,) = repair(findings, lambda: map(str, recover(tmp_path)), root=tmp_path)
    assert done.endswith("undone: nothing was left")
    assert [finding for finding in node._check_sessions(tmp_path) if finding.check == "sessions"] == []


def test_an_installation_is_repaired_and_nothing_else(tmp_path: Path) -> None:
    missing = Finding("installation", Status.FAIL, "", "ocihook install", Repair.INSTALL)
    other = Finding("huge pages", Status.WARN, "", "echo madvise")
    assert repair([other], list, root=tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    done = repair([missing, missing, other], list, root=tmp_path)
    assert f"wrote {tmp_path}/etc/criu/runc.conf" in done
    assert b"action-script" in (tmp_path / "etc/criu/runc.conf").read_bytes()
    assert repair([missing], list, root=tmp_path) == []


def test_a_package_is_repaired_with_what_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No second launcher, and no units that name this release."""
    monkeypatch.setattr("ocihook.node.distribution.is_packaged", lambda: True)
    launcher = tmp_path / "usr/libexec/ocihook/criu-action"
    launcher.parent.mkdir(parents=True)
    launcher.write_text("#!/bin/sh\n")
    (tmp_path / "usr/lib/systemd/system").mkdir(parents=True)
    missing = Finding("installation", Status.FAIL, "", "ocihook install", Repair.INSTALL)
    done = repair([missing], list, root=tmp_path)
    assert {line.partition(str(tmp_path))[2] for line in done} == {"/etc/criu/runc.conf", "/etc/criu/default.conf"}
    assert "action-script /usr/libexec/ocihook/criu-action\n" in (tmp_path / "etc/criu/runc.conf").read_text()
    assert not (tmp_path / "usr/local").exists()


def test_a_socket_that_does_not_listen_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "_systemctl", lambda *words, **_: called.append(words))
    inactive = Finding("agent", Status.WARN, "", install.LISTEN, Repair.LISTEN)
    assert repair([inactive], list, root=tmp_path) == ["enabled and started ocihook.socket"]
    assert called == [("enable", "--now", "ocihook.socket")]


def test_a_container_is_told_what_the_preflight_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Managed memory, too; and with what to do about it apart from what it is."""
    pid = os.getpid()
    signs = Signs(pid=pid, has_driver=True, device_files=1, has_managed_memory=True, has_ipc=True)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(container, "find_gpu_processes", lambda _pid: [signs])
    monkeypatch.setattr(container, "has_driver", lambda: True)
    monkeypatch.setattr(container, "CudaDriver", lambda: None)
    monkeypatch.setattr(container, "states", lambda *_: {Process(pid, 1): CudaState.RUNNING})
    monkeypatch.setattr(preflight, "read_node", lambda _patience: ("580.1", []))
    findings = list(container._check_gpu(Observation(init_pid=pid)))
    refused = [finding for finding in findings if finding.status is Status.FAIL]
    situation = preflight.Situation.read(pid, [signs], {Process(pid, 1): CudaState.RUNNING}, ENDLESS)
    assert [f"{f.detail}: {f.remedy}" for f in refused] == preflight.refusals(situation)
    assert [f.remedy.partition(" ")[0] for f in refused] == ["install", "have"]
    assert "cudaMallocManaged" in refused[1].detail


@pytest.mark.parametrize("is_loaded", [True, False])
def test_libcuda_without_a_driver_is_no_good(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_loaded: bool
) -> None:
    """A dump of that process is refused; also where the driver is there and its library is not found."""
    monkeypatch.setattr(library, "KERNEL_DRIVER", (tmp_path if is_loaded else tmp_path / "none",))
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(container, "find_gpu_processes", lambda pid: [Signs(pid=pid, has_driver=True)])
    monkeypatch.setattr(container, "has_driver", lambda: False)
    (finding,) = container._check_gpu(Observation(init_pid=os.getpid()))
    assert finding.status is Status.FAIL
    assert f"processes {os.getpid()} use NVIDIA's driver" in finding.detail
    assert finding.remedy.startswith("name its directory" if is_loaded else "install NVIDIA's driver")


@pytest.mark.parametrize(
    ("text", "names", "limit_bytes"),
    [
        ("", set(), 1 << 20),
        ("tcp-close\nlink-remap\nno-link-remap\n", {"tcp-close"}, 1 << 20),
        ("ghost-limit 512M\n", set(), 512 << 20),
        ("--file-locks\nghost-limit=70000\n", {"file-locks"}, 70000),
    ],
)
def test_options_that_criu_would_have(
    programs: dict[str, Program], tmp_path: Path, text: str, names: set[str], limit_bytes: int
) -> None:
    put(programs, "runc", 1, 3)
    (tmp_path / "runc.conf").write_text(text)
    options = criu_files.options_for("runc")
    assert (set(options.names), options.ghost_limit_bytes) == (names, limit_bytes)
    assert options.file == str(tmp_path / "runc.conf")
    assert criu_files.options_for("").names == set()  # a `criu dump` by hand does not read it


def test_memory_counts_as_criu_writes_it() -> None:
    """Shared memory counts once, and mapped files do not count."""
    shared = os.memfd_create("shared")
    os.truncate(shared, 8 << 20)
    with mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE) as own, mmap.mmap(shared, 8 << 20) as once:
        before = container.needed_bytes(observe(os.getpid()))
        for memory in (own, once):
            memory[:] = bytes(len(memory))
        grown = container.needed_bytes(observe(os.getpid())) - before
    os.close(shared)
    assert 24 << 20 <= grown < 26 << 20


def observe(pid: int) -> Observation:
    return Observation(
        init_pid=pid,
        processes=(
            ProcessSeen(pid=pid, files=(*open_files(pid), *mapped_files(pid, Path(f"/proc/{pid}/maps").read_text()))),
        ),
    )


@pytest.mark.parametrize(
    ("places", "status"),
    [(("/",), Status.OK), (("/proc",), Status.FAIL), (("/", "/proc"), Status.WARN), (("/missing",), Status.OK)],
)
def test_room_for_a_dump(monkeypatch: pytest.MonkeyPatch, places: tuple[str, ...], status: Status) -> None:
    """/proc has no space. Where only one of several places does, it depends on the way of the dump."""
    monkeypatch.setattr(container, "image_set_places", lambda _engine: places)
    (finding,) = container.check_size(observe(os.getpid()))
    assert finding.status is status
    assert finding.check == ("size" if status is Status.OK else "no-space")
