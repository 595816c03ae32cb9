"""Hook and agent as real processes, in a mount namespace of their own, with a stand-in for CRIU."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.namespace import Namespace, wait_for
from ocihook.images.image_set import verify_image_set
from tests.fakes.images import make_image_set, mixed_pages
from tests.unit.test_linux import is_removed

PROJECT = Path(__file__).parents[2]
FAKE_CRIU = PROJECT / "tests/fakes/criu.py"
MEMORY = {1: mixed_pages(300), 4: mixed_pages(60, seed=5)}
ID = "cd" * 32

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: hook and agent serve root only")

_SETUP = """
mount -t tmpfs tmpfs /run
mkdir -p /var/lib/ocihook
mount -t tmpfs tmpfs /var/lib/ocihook
mkdir /run/upper /run/work
mount -t overlay overlay -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work /etc
mkdir -p /etc/ocihook
echo '[agent]' > /etc/ocihook/config.toml
echo 'idle_timeout_s = 1' >> /etc/ocihook/config.toml
"""

# What systemd does: it listens, and starts the agent for a client.
_SYSTEMD = (
    "import os, select, socket, sys\n"
    "os.makedirs('/run/ocihook', 0o700, exist_ok=True)\n"
    "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind('/run/ocihook/new'); s.listen()\n"
    "print(os.stat('/run/ocihook/new').st_ino, flush=True)\n"
    "os.rename('/run/ocihook/new', '/run/ocihook/agent.sock')\n"
)
_EXECUTE = (
    "os.dup2(s.fileno(), 3); os.set_inheritable(3, True)\n"
    "os.environ |= {'LISTEN_FDS': '1', 'LISTEN_PID': str(os.getpid())}\n"
    "os.execv(sys.executable, [sys.executable, '-m', 'ocihook', 'agent'])\n"
)
# Again and again, as long as there are clients.
_ACTIVATE = (
    "while True:\n"
    "    select.select([s], [], [])\n"
    "    if os.fork() == 0:\n"
    "        os.dup2(s.fileno(), 3); os.set_inheritable(3, True)\n"
    "        os.environ |= {'LISTEN_FDS': '1', 'LISTEN_PID': str(os.getpid())}\n"
    "        os.execv(sys.executable, [sys.executable, '-m', 'ocihook', 'agent'])\n"
    "    os.wait()\n"
)


class Node:
    """A namespace with a rendered action script, an image set, and a bundle."""

    def __init__(self, scratch: Path, init_pid: int) -> None:
        self.namespace = Namespace(_SETUP)
        self.agents: list[subprocess.Popen[bytes]] = []
        self.init_pid = init_pid
        self.scratch = scratch
        self.images = scratch / "checkpoint"
        self.script = scratch / "criu-action"
        self.render(sys.executable, PROJECT)
        self.bundle = scratch / "bundle"
        self.bundle.mkdir()
        self.annotate({})
        make_image_set(self.images, MEMORY)

    def render(self, python: str, site: Path) -> None:
        template = (PROJECT / "ocihook/hook/criu-action").read_text()
        self.script.write_text(template.replace("@PYTHONS@", python).replace("@SITE@", str(site)))
        self.script.chmod(0o755)

    def annotate(self, annotations: dict[str, str]) -> None:
        ours = {
            "io.container.manager": "libpod",
            "ocihook.io/preflight": "warn",
        }  # its init shares the machine's mounts
        spec = {"annotations": {**ours, **annotations}}
        (self.bundle / "config.json").write_text(json.dumps(spec))

    def criu_command(self, verb: str, stages: list[str], images: Path | None = None, container: str = ID) -> list[str]:
        """Return the command of a shell that looks like runc and runs the stand-in as its child."""
        arguments = [str(FAKE_CRIU), str(self.script), str(images or self.images), str(self.init_pid), *stages]
        inner = f"{sys.executable} {' '.join(arguments)}; true"
        runc = f"exec -a runc sh -s -- {verb} --bundle {self.bundle} {container}"
        return ["bash", "-c", f"{runc} <<'EOF'\n{inner}\nEOF"]

    def criu(self, verb: str, *stages: str, images: Path | None = None) -> str:
        """Run the stand-in; return what it prints."""
        return self.namespace.run(*self.criu_command(verb, list(stages), images))

    def run_dir(self, name: str) -> Path:
        return self.namespace.path(f"/run/ocihook/{name}")

    def history(self) -> list[dict[str, object]]:
        wait_for("sessions to end", lambda: not list(self.run_dir("sessions").glob("*")))
        files = sorted(self.namespace.path("/var/lib/ocihook/history").glob("*.json"))
        return [json.loads(file.read_text()) for file in files]

    def stay(self) -> None:
        """Let agents that start from now on stay: on a slow machine a client may take long to connect."""
        config = self.namespace.path("/etc/ocihook/config.toml")
        config.write_text(config.read_text().replace("idle_timeout_s = 1\n", "idle_timeout_s = 600\n"))

    def agent(self) -> subprocess.Popen[bytes]:
        """Start an agent in the foreground that stays; wait until it listens."""
        self.stay()
        agent = self.namespace.spawn(sys.executable, "-m", "ocihook", "agent", log=self.scratch / "agent.log")
        self.agents.append(agent)
        wait_for("the agent", self.run_dir("agent.sock").exists)
        return agent

    def kill(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill an agent and wait until its sessions are gone, too: they share its lock, and still put things back."""
        agent.kill()
        agent.wait(60)
        with self.run_dir("agent.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)


@pytest.fixture
def node(tmp_path: Path, container_pid: int) -> Iterator[Node]:
    made = Node(tmp_path, container_pid)
    try:
        yield made
        for agent in made.agents:
            agent.terminate()
        wait_for("the agent to leave", lambda: not made.run_dir("agent.sock").exists())
    finally:
        made.namespace.close()


def test_a_dump_and_a_restore_without_any_agent_running(node: Node) -> None:
    output = node.criu("checkpoint", "pre-dump", "network-lock", "post-dump", "pages?")
    assert "pre-dump 0" in output
    assert "post-dump 0" in output
    assert "pages []" in output
    manifest = verify_image_set(node.images, workers=1)
    assert manifest is not None
    assert manifest.container.id == ID
    output = node.criu("restore", "pre-restore", "pages?", "post-resume")
    assert "pre-restore 0" in output
    assert "pages ['pages-1.img', 'pages-2.img']" in output
    dump, restore = node.history()
    assert dump["effects"] == restore["effects"] == []
    # When CRIU is gone the directory is as it was: packed.
    assert not list(node.images.glob("pages-*"))
    assert verify_image_set(node.images, workers=1) == manifest
    log = node.run_dir("agent.log").read_text()
    assert log.count(": packed 1474560 bytes") == 1, "a stage that CRIU asks for twice is done once"


def test_a_stage_starts_python_once(node: Node) -> None:
    """CRIU <= 4.1.1 starts the action script at least twice; a veto stays one however often it is asked for."""
    started, python = node.scratch / "started", node.scratch / "python"
    python.write_text(f'#!/bin/sh\necho "$CRTOOLS_SCRIPT_ACTION" >> {started}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    node.render(str(python), PROJECT)
    assert "post-dump 0" in node.criu("checkpoint", "pre-dump", "post-dump")
    assert started.read_text().split() == ["pre-dump", "post-dump"]
    node.annotate({"ocihook.io/mode": "no such"})
    assert "pre-dump 1" in node.criu("checkpoint", "pre-dump")
    assert started.read_text().split()[2:] == ["pre-dump"] * 2
    node.history()
    assert not list(node.run_dir("sessions").iterdir())


def test_why_a_dump_fails_is_told_while_criu_is_still_there(node: Node) -> None:
    """When it unlocks the network and has not written its inventory, the last image of a dump."""
    (node.images / "inventory.img").unlink()
    log = f"log={PROJECT / 'tests/data/criu-logs/dump-flock.log'}"
    output = node.criu("checkpoint", "pre-dump", "network-lock", log, "network-unlock").splitlines()
    told = [line for line in output if line.startswith("ocihook: the dump of container")]
    assert len(told) == 1
    assert "a process holds a file lock" in told[0]
    assert output.index(told[0]) < output.index("network-unlock 0 ")
    (record,) = node.history()
    assert record["error_code"] == "criu-file-locks"
    (node.images / "inventory.img").touch()
    assert "network-unlock 0" in node.criu("checkpoint", "network-unlock")
    assert len(node.history()) == 1, "the agent was asked"


def test_the_agent_leaves_the_cgroup_of_its_caller(node: Node) -> None:
    mount = Path("/sys/fs/cgroup/unified")
    mount = mount if mount.exists() else Path("/sys/fs/cgroup")
    group = mount / f"ocihook-test-{os.getpid()}"
    group.mkdir()
    node.stay()
    try:
        node.namespace.run(
            "sh",
            "-c",
            f'echo 0 > {group}/cgroup.procs; exec "$@"',
            "sh",
            *node.criu_command("checkpoint", ["pre-dump"]),
        )
        pid = node.run_dir("agent.lock").read_text().strip()
        assert "0::/\n" in Path(f"/proc/{pid}/cgroup").read_text()
        assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[3] == pid, "not a session of its own"
        os.kill(int(pid), signal.SIGTERM)
    finally:
        wait_for("the cgroup to be removed", lambda: is_removed(group))


def test_an_agent_that_is_ended_while_it_starts_leaves_no_socket(node: Node) -> None:
    ended = "server.load_bindings = lambda: os.kill(os.getpid(), signal.SIGTERM); server.main()"
    node.namespace.run(sys.executable, "-c", f"import os, signal; from ocihook.agent import server; {ended}")
    assert not node.run_dir("agent.sock").exists()


def test_unhandled_stages_start_nothing(node: Node) -> None:
    node.render("/no/such/python", PROJECT)
    output = node.criu("checkpoint", "network-lock", "network-unlock", "setup-namespaces", "post-restore")
    assert [line.split()[1] for line in output.splitlines()] == ["0"] * 4
    assert not node.run_dir("agent.lock").exists()


def test_a_stale_socket_is_replaced(node: Node) -> None:
    node.run_dir("").mkdir()
    node.namespace.run(
        sys.executable,
        "-c",
        ("import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind('/run/ocihook/agent.sock')"),
    )
    assert node.run_dir("agent.sock").is_socket()
    assert "post-dump 0" in node.criu("checkpoint", "pre-dump", "post-dump")
    assert verify_image_set(node.images, workers=1) is not None


def test_a_second_agent_leaves_at_once(node: Node) -> None:
    agent = node.agent()
    output = node.namespace.run(sys.executable, "-m", "ocihook", "agent")
    assert "another agent runs" in output
    assert agent.poll() is None
    assert "post-dump 0" in node.criu("checkpoint", "pre-dump", "post-dump")


def test_hooks_at_once_share_one_agent_and_do_not_meet(node: Node) -> None:
    sets = [node.scratch / f"set{number}" for number in range(4)]
    for number, images in enumerate(sets):
        make_image_set(images, {1: mixed_pages(200, seed=number)})
    logs = [node.scratch / f"{images.name}.log" for images in sets]
    criu = [
        node.namespace.spawn(*node.criu_command("checkpoint", ["pre-dump", "post-dump"], images, container), log=log)
        for images, log, container in zip(sets, logs, ("ab" * 32, "bc" * 32, "de" * 32, "ef" * 32), strict=True)
    ]
    for process in criu:
        assert process.wait(60) == 0
    assert all("post-dump 0" in log.read_text() for log in logs)
    assert all(verify_image_set(images, workers=1) for images in sets)
    assert len(node.history()) == 4


def test_criu_killed_after_pre_restore(node: Node) -> None:
    node.criu("checkpoint", "pre-dump", "post-dump")
    log = node.scratch / "criu.log"
    node.namespace.spawn(*node.criu_command("restore", ["pre-restore", "wait"]), log=log)
    wait_for("the restore to begin", lambda: "waiting" in log.read_text())
    assert list(node.images.glob("pages-*"))
    (session,) = node.run_dir("sessions").glob("*.json")
    os.kill(json.loads(session.read_text())["criu"][0], signal.SIGKILL)
    assert node.history()[-1]["effects"] == []
    assert not list(node.images.glob("pages-*"))
    assert verify_image_set(node.images, workers=1) is not None


def lose_socket(node: Node) -> None:
    node.run_dir("agent.sock").unlink()


def remove_directory(node: Node) -> None:
    shutil.rmtree(node.run_dir(""))


def cover(node: Node) -> None:
    node.namespace.run("mount", "-t", "tmpfs", "tmpfs", "/run")


LOSSES = pytest.mark.parametrize("lose", [lose_socket, remove_directory, cover])


@LOSSES
def test_an_agent_that_cannot_be_found(node: Node, lose: Callable[[Node], None]) -> None:
    """It listens again, or leaves to another one; and its end takes nothing from that."""
    agent = node.agent()
    lose(node)
    assert "post-dump 0" in node.criu("checkpoint", "pre-dump", "post-dump")
    assert (agent.wait(60) == 0) if lose is not lose_socket else (agent.poll() is None)
    assert "removed" in (node.scratch / "agent.log").read_text()
    holder = int(node.run_dir("agent.lock").read_text())
    assert node.run_dir("agent.sock").is_socket()
    assert "pre-restore 0" in node.criu("restore", "pre-restore", "post-resume")
    assert int(node.run_dir("agent.lock").read_text()) == holder
    os.kill(holder, signal.SIGTERM)


@LOSSES
def test_an_agent_that_cannot_be_found_in_the_middle_of_a_dump(node: Node, lose: Callable[[Node], None]) -> None:
    """The dump is completed by the agent that began it, or fails: another knows nothing of what CRIU left out."""
    agent = node.agent()
    log, go_on = node.scratch / "criu.log", node.scratch / "go-on"
    stages = ["pre-dump", f"until={go_on}", "post-dump"]
    criu = node.namespace.spawn(*node.criu_command("checkpoint", stages), log=log)
    wait_for("the dump to begin", lambda: "waiting" in log.read_text())
    lose(node)
    go_on.touch()
    assert criu.wait(60) == 0
    if lose is lose_socket:
        assert "post-dump 0" in log.read_text()
        assert verify_image_set(node.images, workers=1) is not None
        agent.terminate()
    else:
        assert "post-dump 1" in log.read_text()
        assert "there is no record of pre-dump" in log.read_text()
        assert agent.wait(60) == 0
        os.kill(int(node.run_dir("agent.lock").read_text()), signal.SIGTERM)
    assert all(record["effects"] == [] for record in node.history())


def test_an_idle_agent_leaves_to_whatever_has_taken_its_path(node: Node) -> None:
    """As systemd does when its socket is started while an agent of the hook's runs."""
    agent = node.agent()
    node.namespace.run(sys.executable, "-c", f"{_SYSTEMD}")
    assert agent.wait(60) == 0
    assert node.run_dir("agent.sock").is_socket()
    node.run_dir("agent.sock").unlink()


def test_an_agent_at_work_takes_its_path_back(node: Node) -> None:
    node.agent()
    log, go_on = node.scratch / "criu.log", node.scratch / "go-on"
    stages = ["pre-dump", f"until={go_on}", "post-dump"]
    criu = node.namespace.spawn(*node.criu_command("checkpoint", stages), log=log)
    wait_for("the dump to begin", lambda: "waiting" in log.read_text())
    starter, other_log = f"{_SYSTEMD}{_ACTIVATE}", node.scratch / "other.log"
    files = [node.run_dir("agent.sock").stat().st_ino]
    other = node.namespace.spawn(sys.executable, "-c", starter, log=other_log)
    wait_for("the other to have its file", lambda: other_log.exists() and other_log.read_text().endswith("\n"))
    files.append(int(other_log.read_text().split()[0]))

    def is_taken_back() -> bool:
        with contextlib.suppress(FileNotFoundError):  # it removes the other's file before it makes its own
            return node.run_dir("agent.sock").stat().st_ino not in files
        return False

    wait_for("the agent to take its path back", is_taken_back)
    go_on.touch()
    assert criu.wait(60) == 0
    assert "post-dump 0" in log.read_text()
    assert verify_image_set(node.images, workers=1) is not None
    other.terminate()


def test_systemd_starts_an_agent_whose_socket_has_no_file(node: Node) -> None:
    starter = f"{_SYSTEMD}os.unlink('/run/ocihook/agent.sock')\n{_EXECUTE}"
    node.stay()
    agent = node.namespace.spawn(sys.executable, "-c", starter, log=node.scratch / "agent.log")
    node.agents.append(agent)
    wait_for("the socket", node.run_dir("agent.sock").is_socket)
    assert "post-dump 0" in node.criu("checkpoint", "pre-dump", "post-dump")
    assert agent.poll() is None


def test_a_process_that_holds_the_lock_and_does_not_listen(node: Node) -> None:
    holder = node.namespace.spawn(
        sys.executable,
        "-c",
        "import os, pathlib, time; from ocihook.session.lock import lock_agent\n"
        "lock = lock_agent(pathlib.Path('/run/ocihook')); os.write(lock, b'%d' % os.getpid()); time.sleep(600)",
        log=node.scratch / "holder.log",
    )
    wait_for("the lock", lambda: node.run_dir("agent.lock").exists() and node.run_dir("agent.lock").read_text() != "")
    environment = f"CRTOOLS_SCRIPT_ACTION=pre-dump CRTOOLS_IMAGE_DIR={node.images}"
    output = node.namespace.run("sh", "-c", f"{environment} {node.script} 2>&1; echo status $?")
    assert "status 1" in output
    assert f"process {holder.pid} holds /run/ocihook/agent.lock, but does not listen" in output
    holder.kill()
    holder.wait(60)


def test_systemd_passes_its_socket(node: Node) -> None:
    starter = f"{_SYSTEMD}select.select([s], [], [])\n{_EXECUTE}"
    agent = node.namespace.spawn(sys.executable, "-c", starter, log=node.scratch / "agent.log")
    wait_for("the socket", node.run_dir("agent.sock").exists)
    assert "post-dump 0" in node.criu("checkpoint", "pre-dump", "post-dump")
    assert agent.wait(60) == 0, "it leaves when idle"
    assert node.run_dir("agent.sock").exists(), "the socket is systemd's"
    assert "post-dump: container" in (node.scratch / "agent.log").read_text()
    node.run_dir("agent.sock").unlink()


def test_garbage_on_the_socket_harms_nobody(node: Node) -> None:
    node.agent()
    talk = (
        "import socket, sys\n"
        "for packet in (b'', b'x', b'1\\0a\\0b\\0c\\0d', b'1\\0pre-dump\\0' + b'9' * 30 + b'\\0\\0/',\n"
        "               b'\\xff' * 9000,\n"
        "               b'1\\0no-stage\\0001\\0\\0/'):\n"
        "    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect('/run/ocihook/agent.sock')\n"
        "    s.settimeout(60); s.send(packet); print(s.recv(999)[:2])\n"
    )
    assert node.namespace.run(sys.executable, "-c", talk).split("\n")[:6] == ["b''", *["b'1\\x00'"] * 5]
    assert "post-dump 0" in node.criu("checkpoint", "pre-dump", "post-dump")


@pytest.fixture
def nobody(node: Node) -> list[str]:
    """The start of a command that runs as an ordinary user, who can read a copy of the hook."""
    site = Path("/var/tmp") / f"ocihook-hook-{os.getpid()}"
    node.render("/usr/bin/python3", site)
    shutil.copytree(PROJECT / "ocihook", site / "ocihook", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(node.script, site / "criu-action")
    subprocess.run(["chmod", "-R", "a+rX", site], check=True, timeout=60)
    return ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", str(site / "criu-action")]


def test_a_hook_of_an_ordinary_user(node: Node, nobody: list[str]) -> None:
    """It cannot reach the agent: its dumps pass unpacked, a packed checkpoint is not restored."""
    packed = Path(nobody[-1]).parent / "packed"
    try:
        make_image_set(packed, MEMORY)
        (packed / "ocihook.manifest").write_text("")
        empty = packed.parent / "empty"
        empty.mkdir()
        for directory, stage, status in (
            (empty, "pre-dump", "0"),
            (empty, "post-dump", "0"),
            (empty, "pre-restore", "0"),
            (packed, "pre-restore", "1"),
        ):
            environment = {"CRTOOLS_SCRIPT_ACTION": stage, "CRTOOLS_IMAGE_DIR": str(directory)}
            command = ["sh", "-c", '"$@" 2>&1 <&-; echo status $?', "sh", *nobody]
            output = node.namespace.run("env", *(f"{key}={value}" for key, value in environment.items()), *command)
            assert f"status {status}" in output
            assert "only root can checkpoint and restore containers with ocihook" in output
        assert not node.run_dir("agent.lock").exists()

        node.agent()
        connect = (
            "import socket; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect('/run/ocihook/agent.sock')"
        )
        refused = node.namespace.run(*nobody[:-1], "/usr/bin/python3", "-c", connect, check=False)
        assert "PermissionError" in refused
    finally:
        shutil.rmtree(packed.parent)


def test_sigterm_lets_a_session_finish(node: Node) -> None:
    agent = node.agent()
    log = node.scratch / "criu.log"
    node.namespace.spawn(*node.criu_command("checkpoint", ["pre-dump", "wait"]), log=log)
    wait_for("the dump to begin", lambda: "waiting" in log.read_text())
    agent_pid = int(node.run_dir("agent.lock").read_text())
    os.kill(agent_pid, signal.SIGTERM)
    (session,) = node.run_dir("sessions").glob("*.json")
    criu_pid = json.loads(session.read_text())["criu"][0]
    assert agent.poll() is None
    os.kill(criu_pid, signal.SIGKILL)
    assert agent.wait(60) == 0
    assert node.history()[-1]["effects"] == []


def test_a_restarted_agent_takes_over_a_session(node: Node) -> None:
    agent = node.agent()
    log = node.scratch / "criu.log"
    node.namespace.spawn(*node.criu_command("checkpoint", ["pre-dump", "wait"]), log=log)
    wait_for("the dump to begin", lambda: "waiting" in log.read_text())
    node.kill(agent)
    (session,) = node.run_dir("sessions").glob("*.json")
    assert "running" in node.namespace.run(sys.executable, "-m", "ocihook", "recover")
    node.run_dir("agent.sock").unlink()
    node.agent()
    os.kill(json.loads(session.read_text())["criu"][0], signal.SIGKILL)
    assert [s["effects"] for s in node.history()] == [[]]


def test_recover_without_an_agent_undoes_a_restore(node: Node) -> None:
    node.criu("checkpoint", "pre-dump", "post-dump")
    wait_for("the agent to leave", lambda: not node.run_dir("agent.sock").exists())
    agent = node.agent()
    log = node.scratch / "criu.log"
    node.namespace.spawn(*node.criu_command("restore", ["pre-restore", "wait"]), log=log)
    wait_for("the restore to begin", lambda: "waiting" in log.read_text())
    (session,) = node.run_dir("sessions").glob("*.json")
    node.kill(agent)
    os.kill(json.loads(session.read_text())["criu"][0], signal.SIGKILL)
    wait_for("CRIU to be gone", lambda: "undone" in node.namespace.run(sys.executable, "-m", "ocihook", "recover"))
    assert not list(node.images.glob("pages-*"))
    assert verify_image_set(node.images, workers=1) is not None
    node.run_dir("agent.sock").unlink()


def test_a_runtime_directory_that_cannot_be_written(node: Node) -> None:
    """No agent can start: the dump is refused before anything happened, a plain restore continues."""
    node.namespace.run("sh", "-c", "mkdir /run/ocihook; mount -t tmpfs -o ro tmpfs /run/ocihook")
    output = node.criu("checkpoint", "pre-dump")
    assert "pre-dump 1" in output
    assert "the agent cannot start" in output
    assert "the dump is refused, the container runs on" in output
    assert "pre-restore 0" in node.criu("restore", "pre-restore")


def test_metrics_are_served_and_keep_the_agent(node: Node) -> None:
    """While a scraper sends nothing, checkpoints continue; a file that is not a socket stays."""
    address = "unix:/run/ocihook/metrics.sock"
    config = node.namespace.path("/etc/ocihook/config.toml")
    config.write_text(f'[agent]\nidle_timeout_s = 1\nmetrics_address = "{address}"\n')
    agent = node.agent()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(node.run_dir("metrics.sock")))
        assert "post-dump 0" in node.criu("checkpoint", "pre-dump", "post-dump")
        node.history()
        with socket.socket(socket.AF_UNIX) as scraper:
            scraper.connect(str(node.run_dir("metrics.sock")))
            scraper.settimeout(60)
            scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            answer = b"".join(iter(lambda: scraper.recv(1 << 16), b"")).decode()
    assert answer.startswith("HTTP/1.0 200 OK")
    assert 'ocihook_sessions_total{act="dump",outcome="done"} 1.0' in answer
    assert agent.poll() is None
    agent.terminate()
    assert agent.wait(60) == 0

    node.run_dir("metrics.sock").unlink()
    node.run_dir("metrics.sock").write_text("somebody's")
    node.agent()  # that one serves no metrics, and leaves
    assert node.run_dir("metrics.sock").read_text() == "somebody's"
    assert f"metrics cannot be served on {address}" in (node.scratch / "agent.log").read_text()
