"""`ocihook gang checkpoint | restore | verify` with stand-ins for engines: nodes, tries, what a failure leaves."""

import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ocihook.checkpoints.gang_note import GangNote, write_note
from ocihook.cli import gang as command
from ocihook.config import Settings
from ocihook.errors import GangError, IntegrityError, UnsupportedError
from ocihook.gang.link import Link
from ocihook.gang.membership import join
from ocihook.linux.patience import Patience
from ocihook.linux.procfs import Process
from ocihook.model import GangRef
from ocihook.node import gangs
from ocihook.session.journal import Journal
from tests.fakes.images import make_archive, make_image_set, mixed_pages
from tests.unit.test_gang import LIMIT_S, Serving, both

# An engine whose containers are directories: NODE/CONTAINER has `annotations`, `archive` and, to fail, `failures`.
_ENGINE = """#!{python}
import json, shutil, sys, time
from pathlib import Path

root, words = Path({root!r}), sys.argv[1:]
node = root / "here"
if words[0] in ("--url", "--connection"):
    node = root / words[1].replace("/", "_")
    del words[:2]
with (root / "called").open("a") as log:
    log.write(node.name + " " + " ".join(words) + "\\n")
if words[:1] == ["--timeout"]:
    del words[:2]
if words[0] == "container":
    del words[0]
said = lambda each: json.loads((node / each / "annotations").read_text())
match words:
    case ["ps", *_]:
        print("\\n".join(path.name for path in node.glob("*")))
    case ["inspect", *ids] if "crictl" in sys.argv[0]:
        info = {{"runtimeSpec": {{"annotations": said(ids[0])}}, "sandboxID": "of-" + ids[0]}}
        if not (root / "crio").exists():
            info["config"] = {{"image": {{"image": "x", "user_specified_image": "y"}}, "metadata": {{"name": ids[0]}}}}
        print(json.dumps({{"info": info}}))
    case ["inspectp", sandbox]:
        notes = {{"kubernetes.io/config.source": "api"}} if (root / "kubelet").exists() else {{}}
        pod = {{"metadata": {{"name": sandbox}}, "annotations": notes}}
        print(json.dumps({{"status": {{"runtimeHandler": "runc"}}, "info": {{"config": pod}}}}))
    case ["runp", "--runtime=runc", pod]:
        print("new-" + json.loads(Path(pod).read_text())["metadata"]["name"])
    case ["create", sandbox, container, pod]:
        config = json.loads(Path(container).read_text())
        assert json.loads(Path(pod).read_text())["metadata"]["name"] == sandbox[4:]
        assert config["image"]["user_specified_image"] == "y" and Path(config["image"]["image"]).is_file()
        if (root / "uncreated").exists() and sandbox.endswith("b"):
            sys.exit("no room")
        print("made-" + config["metadata"]["name"])
    case ["start", container]:
        if (root / "unstarted").exists() and container.endswith("a"):
            sys.exit("criu failed")
    case ["rmp", "--force", _]:
        pass
    case ["inspect", *ids]:
        print(json.dumps([{{"Id": each, "Name": each, "Config": {{"Annotations": said(each)}}}} for each in ids]))
    case ["checkpoint", *options]:
        target = options[0].partition("=")[2] or options[options.index("--export") + 1]
        failures = node / options[-1] / "failures"
        if failures.exists() and (left := int(failures.read_text())):
            failures.write_text(str(left - 1))
            sys.exit("rank 1 is inside a collective: its CUDA lock has timed out")
        shutil.copy(node / options[-1] / "archive", target)
        while (root / "waits").exists():
            time.sleep(0.01)
    case ["restore", "--import", path]:
        if (node / "broken").exists():
            sys.exit("no such image")
"""


class Stage:
    """Nodes with members of a gang of two, and what is called there."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "nodes"
        self.root.mkdir()
        self.programs = {name: self.root.parent / name for name in ("podman", "crictl")}
        for program in self.programs.values():
            program.write_text(_ENGINE.format(python=sys.executable, root=str(self.root)))
            program.chmod(0o755)

    def member(self, name: str, node: str = "here", namespace: str = "", failures: int = 0) -> None:
        container = self.root / node.replace("/", "_") / name
        container.mkdir(parents=True)
        notes = {"ocihook.io/gang": "job", "ocihook.io/gang-size": "2"}
        if namespace:
            names = {"namespace": namespace, "name": f"pod-{name}", "uid": "u"}
            notes |= {f"io.kubernetes.cri.sandbox-{key}": text for key, text in names.items()}
            notes["io.kubernetes.cri.container-name"] = name
        (container / "annotations").write_text(json.dumps(notes))
        (container / "failures").write_text(str(failures))
        images = self.root.parent / f"images-{namespace}{name}"
        make_image_set(images, {1: mixed_pages(2)})
        called = f"pod-{name}/{name}" if namespace else name
        write_note(images, GangNote(gang=GangRef(namespace, "job", called, 2, 3, "0" * 16), here=1))
        make_archive(container / "archive", images)

    def run(self, *words: str) -> Any:
        podman = [] if words[0] == "verify" else ["--podman", str(self.programs["podman"])]
        done = CliRunner().invoke(command.gang, [*words, *podman, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def mark(self, name: str, *, is_set: bool = True) -> None:
        (self.root / name).touch() if is_set else (self.root / name).unlink()

    def called(self, what: str) -> list[str]:
        lines = (self.root / "called").read_text().splitlines()
        return sorted(line for line in lines if f" {what} " in line)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(command, "load_settings", Settings)
    monkeypatch.setattr(Link, "of", lambda _: Link(socket=str(tmp_path / "none")))
    monkeypatch.setattr(gangs, "_PAUSE_S", 0.01)
    return Stage(tmp_path)


def test_members_on_several_nodes_go_and_come_back(stage: Stage, tmp_path: Path) -> None:
    """Each is restored on the node that it is from, unless another one is named."""
    first, second, third = "ssh://root@one/run/podman.sock", "two", "ssh://root@three/run/podman.sock"
    stage.member("a", first)
    stage.member("b", second)
    where = str(tmp_path / "epoch")
    done = stage.run("checkpoint", "job", where, "--node", first, "--node", second)
    assert (done["epoch"], done["outcome"], sorted(done["archives"])) == (3, "checkpointed", ["a", "b"])
    assert stage.run("restore", where)["outcome"] == "restored"
    assert [line.split()[0] for line in stage.called("restore")] == sorted([first.replace("/", "_"), second])
    assert stage.run("verify", *done["archives"].values())["outcome"] == "complete"
    stage.run("restore", where, "--on", f"b={third}")
    assert third.replace("/", "_") in stage.called("restore")[-1] + stage.called("restore")[-2]
    with pytest.raises(GangError, match="x: not a member of gang job"):
        stage.run("restore", where, "--on", "x=")
    (tmp_path / "epoch/nodes.json").write_text("{")
    with pytest.raises(IntegrityError, match=r"nodes\.json is damaged"):
        stage.run("restore", where)


def test_the_same_member_is_not_on_two_nodes(stage: Stage, tmp_path: Path) -> None:
    stage.member("a", "one")
    (stage.root / "two").symlink_to(stage.root / "one")
    with pytest.raises(GangError, match="member a of gang job runs twice"):
        stage.run("checkpoint", "job", str(tmp_path / "epoch"), "--node", "one", "--node", "two")
    with pytest.raises(GangError, match=r"1 of the 2 members of gang job run there: a"):
        stage.run("checkpoint", "job", str(tmp_path / "epoch"), "--node", "one")
    with pytest.raises(GangError, match="no container of gang other runs there"):
        stage.run("checkpoint", "other", str(tmp_path / "epoch"), "--node", "one")


def test_what_runs_on_nodes_is_shown(stage: Stage) -> None:
    stage.member("a", "one")
    nodes = ["--podman", str(stage.programs["podman"]), "--node", "one", "--node", "two"]
    said = CliRunner().invoke(command.gang, ["status", *nodes], catch_exceptions=False).output
    assert re.search(r"job +a +\S+/podman of one +a\b", said)
    assert "job: 1 of its 2 members run there" in said
    stage.member("b", "two")
    said = CliRunner().invoke(command.gang, ["status", *nodes], catch_exceptions=False).output
    assert re.search(r"job +b +\S+/podman of two", said)
    assert "run there" not in said
    assert "members" not in stage.run("status"), "no engine is asked unless it is named"


def test_it_is_tried_again_while_all_run_on(stage: Stage, tmp_path: Path) -> None:
    """Ranks that were not at the same step are, another time."""
    for name in "ab":
        stage.member(name, failures=2)
    with pytest.raises(GangError, match=r"not checkpointed in 2 tries: a: rank 1 is inside a collective"):
        stage.run("checkpoint", "job", str(tmp_path / "epoch"), "--tries", "2")
    assert not (tmp_path / "epoch.partial").exists()
    for name in "ab":
        (stage.root / "here" / name / "failures").write_text("2")
    assert stage.run("checkpoint", "job", str(tmp_path / "epoch"), "--tries", "3")["epoch"] == 3


def test_phases_are_shown_meanwhile(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each change once, on stderr, with the members' names; another gang is not shown."""
    serving, said = Serving(tmp_path), list[str]()
    monkeypatch.setattr(Link, "of", lambda _: serving.link)
    real = click.echo
    monkeypatch.setattr(
        click, "echo", lambda text, *, err=False, **how: said.append(text) if err else real(text, **how)
    )
    stage.member("a")
    stage.member("b")
    stage.mark("waits")

    def shows(line: str) -> bool:
        return Patience(timeout_s=LIMIT_S).until(lambda: line in said)

    journals = [Journal.create(tmp_path / name, Process(1000, 1)) for name in ("first", "second", "third")]
    with ThreadPoolExecutor() as pool:
        done = pool.submit(stage.run, "checkpoint", "job", str(tmp_path / "epoch"), "--leave-running")
        try:
            other = GangRef("", "another", "a", 2)
            join(journals[2], Patience(), other, "dump", link=serving.link, timeout_s=LIMIT_S)
            first = serving.member(journals[0], "a")
            assert shows("job, dump 1: a joined")
            members = [first, serving.member(journals[1], "b")]
            assert shows("job, dump 1: a joined, b joined")
            both(members, "arrived", {})
            assert shows("job, dump 1: a arrived, b arrived")
            both(members, "held", {})
            assert shows("job, dump 1: a held, b held")
        finally:
            stage.mark("waits", is_set=False)
        assert done.result()["outcome"] == "checkpointed"
    assert len(said) == len({*said})
    assert all(line.startswith("job, dump 1: ") for line in said)


def test_what_has_ended_is_not_tried_again(stage: Stage, tmp_path: Path) -> None:
    """Its archive is all that is left of it; with --leave-running it runs on, and nothing is left behind."""
    stage.member("a", failures=1)
    stage.member("b")
    with pytest.raises(GangError, match="not checkpointed"):
        stage.run("checkpoint", "job", str(tmp_path / "epoch"), "--tries", "5")
    assert [path.name for path in (tmp_path / "epoch.partial").iterdir()] == ["b.tar"]
    (stage.root / "here/a/failures").write_text("1")
    assert stage.run("checkpoint", "job", str(tmp_path / "other"), "--tries", "5", "--leave-running")["epoch"] == 3


def test_pods_of_this_node_by_cri(stage: Stage, tmp_path: Path) -> None:
    """A gang is one of its pods' namespace: the same name in another one is another gang."""
    for name in "ab":
        stage.member(name, namespace="team")
    stage.member("c", namespace="others")
    where, crictl = str(tmp_path / "epoch"), str(stage.programs["crictl"])
    done = stage.run("checkpoint", "team/job", where, "--cri", "--crictl", crictl)
    assert (done["namespace"], sorted(done["archives"])) == ("team", ["pod-a/a", "pod-b/b"])
    assert len(stage.called("checkpoint")) == 2
    rows = stage.run("status", "--cri", "--crictl", crictl)["members"]
    assert [(row["namespace"], row["member"]) for row in rows] == [
        ("others", "pod-c/c"),
        ("team", "pod-a/a"),
        ("team", "pod-b/b"),
    ]
    with pytest.raises(GangError, match="no container of gang job runs there"):
        stage.run("checkpoint", "job", str(tmp_path / "none"), "--cri", "--crictl", crictl)


def test_pods_are_made_again_or_none_is(stage: Stage, tmp_path: Path) -> None:
    """As they were, with the archives as their images; whatever fails, no pod is left."""
    where, cri = str(tmp_path / "epoch"), ("--cri", "--crictl", str(stage.programs["crictl"]))
    for name in "ab":
        stage.member(name, namespace="team")
    stage.run("checkpoint", "team/job", where, *cri)
    assert ((tmp_path / "epoch/pods.json").stat().st_mode & 0o777) == 0o600
    with pytest.raises(GangError, match=r"members of gang team/job run already: pod-a/a, pod-b/b"):
        stage.run("restore", where, *cri)
    shutil.rmtree(stage.root / "here")
    (stage.root / "here").mkdir()
    for mark, message in (
        ("uncreated", "pod-b/b: .*no room"),
        ("unstarted", "its pods are removed: pod-a/a: criu fail"),
    ):
        stage.mark(mark)
        removed = len(stage.called("rmp"))
        with pytest.raises(GangError, match=message):
            stage.run("restore", where, *cri)
        assert [line.split()[-1] for line in stage.called("rmp")[removed:]] == ["new-of-a", "new-of-b"][-2:]
        stage.mark(mark, is_set=False)
        (stage.root / "called").write_text("")
    assert stage.run("restore", where, *cri)["outcome"] == "restored"
    assert [line.split()[-1] for line in stage.called("start")] == ["made-a", "made-b"]
    (tmp_path / "epoch/pods.json").write_text("{")
    with pytest.raises(IntegrityError, match=r"pods\.json is damaged"):
        stage.run("restore", where, *cri)


@pytest.mark.parametrize(("mark", "message"), [("crio", "does not say how its pods"), ("kubelet", "pods of a kubelet")])
def test_pods_that_cannot_be_made_again_are_refused(stage: Stage, tmp_path: Path, mark: str, message: str) -> None:
    where, cri = str(tmp_path / "epoch"), ("--cri", "--crictl", str(stage.programs["crictl"]))
    stage.mark(mark)
    for name in "ab":
        stage.member(name, namespace="team")
    stage.run("checkpoint", "team/job", where, *cri)
    with pytest.raises(UnsupportedError, match=message):
        stage.run("restore", where, *cri)
    assert not stage.called("runp")
