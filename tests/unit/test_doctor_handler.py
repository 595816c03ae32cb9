"""Whether a container that is made again would be restored here, and why not."""

from pathlib import Path

import pytest

from ocihook.config import Settings
from ocihook.criu.version import Program
from ocihook.node.doctor import handler
from ocihook.node.handlers import DROP_INS, ContainerdConfig
from ocihook.preflight.finding import Finding, Status
from ocihook.session import history


class Node:
    """A node as the checks see it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.programs: dict[str, Program] = {}
        self.drop_ins = {engine: root / f"{engine}.toml" for engine in DROP_INS}
        self.dumped = "[plugins.x.containerd.runtimes.ocihook]"
        self.systemd = False
        monkeypatch.setattr(handler, "find_program", self.programs.get)
        monkeypatch.setattr(handler, "DROP_INS", self.drop_ins)
        monkeypatch.setattr(handler, "default_libexec", lambda: root)
        monkeypatch.setattr(handler, "run_output", lambda *_: self.dumped)
        monkeypatch.setattr(handler, "read_containerd", lambda _: ContainerdConfig(3, self.systemd, True))
        self.settings = Settings(history_dir=str(root / "history"))
        monkeypatch.setattr(handler, "load_settings", lambda: self.settings)
        for name in ("_KUBELET_CONFIG", "_NVIDIA"):
            monkeypatch.setattr(handler, name, root / name)
        monkeypatch.setattr(handler, "CDI_DIRS", (root / "cdi",))

    def add(self, engine: str, *, is_known: bool = True) -> None:
        self.programs[engine] = Program(engine, f"/usr/bin/{engine}", (1,))
        self.programs["runc"] = Program("runc", "/usr/bin/runc", (1,))
        if is_known:
            self.drop_ins[engine].touch()

    def install(self, script: str = "#!/bin/sh\necho runc version 1.2\necho more\n") -> None:
        (self.root / "ocihook-runc").write_text(script)
        (self.root / "ocihook-runc").chmod(0o755)

    def kubelet(self, text: str) -> None:
        (self.root / "_KUBELET_CONFIG").write_text(text)

    def found(self) -> list[Finding]:
        return [finding for check in handler.CHECKS for finding in check()]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Node:
    return Node(monkeypatch, tmp_path)


def test_without_an_engine_or_a_handler(node: Node) -> None:
    assert node.found() == []
    node.add("podman", is_known=False)
    (finding,) = node.found()
    assert finding.status == Status.SKIP
    assert "no engine knows it (podman)" in finding.detail


def test_a_handler_that_works(node: Node) -> None:
    node.add("containerd")
    node.install()
    node.kubelet('cgroupDriver: "cgroupfs"\nshutdownGracePeriod: 60s\n')
    (finding,) = node.found()
    assert finding.status == Status.OK
    assert finding.detail.endswith("ocihook-runc, before runc version 1.2")


@pytest.mark.parametrize(
    ("script", "word"),
    [("", "cannot be made"), ("#!/bin/sh\necho no >&2; exit 3\n", "fails: no"), ("#!/none\n", "cannot be run")],
)
def test_a_handler_that_does_not(node: Node, script: str, word: str) -> None:
    node.add("podman")
    if script:
        node.install(script)
    (finding,) = node.found()
    assert finding.status == Status.FAIL
    assert word in finding.detail


def test_what_keeps_containerd_from_it(node: Node) -> None:
    node.add("containerd")
    node.install()
    node.dumped = ""
    node.systemd = True
    node.kubelet("cgroupDriver: cgroupfs\nshutdownGracePeriod: 0s\n")
    details = [finding.detail for finding in node.found() if finding.status != Status.OK]
    assert details == [
        "containerd does not read the handler's drop-in",
        "the kubelet's cgroup driver is cgroupfs, and containerd's handlers have SystemdCgroup = true",
        "the kubelet has no shutdownGracePeriod: a node that shuts down checkpoints nothing",
    ]


@pytest.mark.parametrize(
    ("grace", "is_enough"),
    [("1m30s", True), ("0h1m5.5s", True), ("65000ms", True), ("1m", False), ("30s", False), ("500us", False)],
)
def test_a_node_that_shuts_down_waits_for_the_longest_dump(node: Node, grace: str, *, is_enough: bool) -> None:
    node.add("podman")
    node.install()
    directory = Path(node.settings.history_dir)
    for number, (stage, status, seconds) in enumerate(
        [("post-dump", 0, 12.0), ("post-dump", 0, 65.0), ("post-dump", 1, 400.0), ("post-resume", 0, 500.0)]
    ):
        record = {"began": 1000.0, "ended": 1000.0 + seconds, "stages": {stage: {"status": status}}}
        history.keep(directory, str(number), {**record, "phases": [], "facts": {}}, limit=10)
    node.kubelet(f'shutdownGracePeriod: "{grace}"\n')
    warned = [finding.detail for finding in node.found() if finding.status != Status.OK]
    words = f"the kubelet's shutdownGracePeriod is {grace}, and a dump on this node has taken 65.0 s"
    assert warned == ([] if is_enough else [words])


def test_gpus_need_cdi(node: Node) -> None:
    node.add("podman")
    node.install()
    (node.root / "_NVIDIA").mkdir()
    assert [finding.status for finding in node.found()] == [Status.OK, Status.WARN]
    (node.root / "cdi").mkdir()
    (node.root / "cdi/nvidia.yaml").touch()
    assert [finding.status for finding in node.found()] == [Status.OK]
    node.add("containerd")
    assert [finding.status for finding in node.found()] == [Status.OK]
    node.dumped += "\nenable_cdi = false\n"  # the default of containerd 1.7
    assert "containerd does not use CDI" in node.found()[-1].detail
