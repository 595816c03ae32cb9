"""The runtime handler's first look: what is not about a container of ours is the runtime's, word by word."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from ocihook.errors import OcihookError
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.runtime.call import Call

HANDLER = Path(__file__).parents[2] / "ocihook/hook/handler"
ID = "c" * 64


class Node:
    """The handler before a runtime, with a Python, that both print what they were called with."""

    def __init__(self, tmp_path: Path) -> None:
        self.kept = tmp_path / "containers"
        self.bundle = tmp_path / "bundle"
        self.bundle.mkdir()
        self.kept.mkdir()
        for name in ("runtime", "python"):
            program = tmp_path / name
            program.write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@" "PATH=$PATH"\n')
            program.chmod(0o755)
        text = HANDLER.read_text()
        values = {"@RUNTIME@": tmp_path / "runtime", "@PYTHONS@": f"'{tmp_path}/python'", "@SITE@": "/site"}
        for name, value in values.items():
            text = text.replace(name, str(value))
        self.handler = tmp_path / "ocihook-runc"
        self.handler.write_text(text.replace("/run/ocihook/containers", str(self.kept)))
        self.handler.chmod(0o755)

    def call(self, *words: str, path: str = "/usr/bin:/bin") -> list[str]:
        done = subprocess.run([self.handler, *words], capture_output=True, text=True, check=True, env={"PATH": path})
        assert done.stderr == ""
        return done.stdout.splitlines()

    def annotate(self, **annotations: str) -> None:
        (self.bundle / "config.json").write_text(json.dumps({"annotations": annotations}))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


GLOBAL = ["--root", "/run/start", "--log", "kill", "--log-format=json", "--systemd-cgroup"]


@pytest.mark.parametrize(
    "words",
    [
        [*GLOBAL, "create", "--bundle", "BUNDLE", "--pid-file", "/delete", ID],
        [*GLOBAL, "create", "--bundle=BUNDLE", ID],
        ["create", "-b", "BUNDLE", ID],
        ["create", "-bundle", "BUNDLE", "--console-socket", "start", ID],
        [*GLOBAL, "restore", "--detach", "--image-path", "/kill", "--bundle", "BUNDLE", ID],
    ],
)
def test_create_is_ours_with_an_annotation_alone(node: Node, words: list[str]) -> None:
    words = [word.replace("BUNDLE", str(node.bundle)) for word in words]
    node.annotate(other="ocihook")
    assert node.call(*words) == ["runtime", *words, "PATH=/usr/bin:/bin"]
    node.annotate(**{"ocihook.io/restore-from": "latest"})
    told = node.call(*words)
    assert told[0] == "python"
    assert told[-len(words) - 3 : -1] == ["/site", str(node.bundle.parent / "runtime"), *words]


@pytest.mark.parametrize(
    "words",
    [
        ["start", ID],
        ["state", ID],
        ["kill", "--all", ID, "15"],
        ["delete", "--force", ID],
        ["checkpoint", "--image-path", "/images", "--leave-running", "--work-path", "/w", ID],
    ],
)
def test_other_calls_are_ours_if_the_container_is(node: Node, words: list[str]) -> None:
    assert node.call(*GLOBAL, *words)[0] == "runtime"
    (node.kept / ID).mkdir()
    assert node.call(*GLOBAL, *words)[0] == "python"
    assert node.call(*GLOBAL, words[0], *(w.replace(ID, "d" * 64) for w in words[1:]))[0] == "runtime"


def test_a_held_container_is_started_at_a_glance(node: Node) -> None:
    """One line says who is held and what thaws it; all that is not so plain is left to Python, which reports it."""
    me = Process.find(os.getpid())
    assert me is not None
    kept, switch = node.kept / ID, node.kept.parent / "cgroup of it"
    kept.mkdir()
    ended = subprocess.Popen(["true"])
    assert Patience(timeout_s=60).until(lambda: Process.find(ended.pid) is None)  # it is a zombie
    ended_ticks = Path(f"/proc/{ended.pid}/stat").read_text().rpartition(")")[2].split()[19]
    for pid, ticks, path in (
        (me.pid, me.start_ticks + 1, switch),
        (ended.pid, ended_ticks, switch),
        (me.pid, me.start_ticks, node.kept / "no/such/cgroup"),
    ):
        switch.write_text("1")
        (kept / "held").write_text(f"{pid} {ticks} 0 {path}\n")
        assert node.call(*GLOBAL, "start", ID)[0] == "python"
        assert switch.read_text() == "1"
        assert (kept / "held").exists()
    ended.wait()
    (kept / "held").write_text("")
    assert node.call("start", ID)[0] == "python"
    (kept / "held").write_text(f"{me.pid} {me.start_ticks} 0 {switch}\n")
    assert node.call("state", ID)[0] == "python"
    assert node.call(*GLOBAL, "start", ID) == []
    assert switch.read_text() == "0\n"
    assert not (kept / "held").exists()
    assert node.call("start", ID)[0] == "python"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--version"],
        ["features"],
        ["exec", ID, "start"],
        ["list"],
        ["kill"],
        ["create"],
        ["checkpoint", ID, "--help"],
    ],
)
def test_whatever_else_there_is_goes_through(node: Node, words: list[str]) -> None:
    (node.kept / ID).mkdir()
    assert node.call(*words) == ["runtime", *words, "PATH=/usr/bin:/bin"]


def test_a_runtime_without_a_path_finds_criu(node: Node) -> None:
    assert node.call("kill", ID, path="")[-1].endswith("/usr/sbin:/usr/bin:/sbin:/bin")


def test_arguments_are_passed_as_they_are(node: Node) -> None:
    words = ["exec", "--env", "A=b c", "", "*", "$(id)", "a'b\"c"]
    assert node.call(*words)[1:-1] == words


def test_a_call_is_read_as_runtimes_read_it() -> None:
    words = [
        "--root",
        "/r",
        "--log=/l",
        "--systemd-cgroup",
        "create",
        "-bundle",
        "/b",
        "--no-pivot",
        "--pid-file=/p",
        ID,
    ]
    call = Call.parse(Path("/usr/sbin/runc"), words)
    assert (call.command, call.container_id, call.bundle) == ("create", ID, Path("/b"))
    assert call.options == {"--bundle": "/b", "--no-pivot": "", "--pid-file": "/p"}
    assert call.prefix == ("--root", "/r", "--log=/l", "--systemd-cgroup")
    assert (call.global_option("--root"), call.global_option("--log"), call.global_option("--criu")) == ("/r", "/l", "")
    assert call.prefix_with_log(Path("/x")) == ["--root", "/r", "--systemd-cgroup", "--log=/x"]
    assert Call.parse(Path("crun"), ["kill", "--all", ID, "TERM"]).positional == (ID, "TERM")
    restore = ["restore", "--detach", "--image-path", "/i", "--manage-cgroups-mode=soft", "-work-path", "/w", ID]
    assert Call.parse(Path("runc"), restore).container_id == ID


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc"])
def test_what_is_no_id_is_refused(name: str) -> None:
    call = Call.parse(Path("/usr/sbin/runc"), ["start", *([name] if name else [])])
    with pytest.raises(OcihookError, match="is not a container id"):
        _ = call.container_id


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_what_the_handler_says_is_where_engines_look(
    tmp_path: Path, log_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    call = Call.parse(Path("runc"), ["--log", str(log), "--log-format", log_format, "create", ID])
    call.say('no "image"')
    said = log.read_text()
    assert json.loads(said)["msg"] == 'ocihook: no "image"' if log_format == "json" else 'level="error"' in said
    assert capfd.readouterr() == ("", "")
    Call.parse(Path("runc"), ["create", ID]).say("no image")
    assert capfd.readouterr() == ("", "ocihook: no image\n")
