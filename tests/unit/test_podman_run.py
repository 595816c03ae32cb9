"""`ocihook run`: which checkpoint is meant, how its container was made, and what is refused before anything is done."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ocihook.cli.main import cli
from ocihook.config import Settings
from ocihook.errors import NoCheckpoint, OcihookError, UnsupportedError
from ocihook.linux.patience import ENDLESS
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.node import podman_run
from ocihook.node.podman_run import find_checkpoint, parse_recipe
from ocihook.runtime import containers
from ocihook.runtime.choice import Known

IMAGE = "5" * 64
ID = "20261123T120000Z-0123abcd"


def config(*command: str, arguments: Sequence[str] = ("work", "--name", "x"), **more: str) -> dict[str, Any]:
    named = {"rootfsImageID": IMAGE, "rootfsImageName": "docker.io/library/job:1", **more}
    return {"CreateCommand": ["podman", *command], "command": [*arguments], **named}


def test_options_are_those_that_it_was_made_with_but_its_own() -> None:
    words = [
        "--root",
        "/r",
        "run",
        "-d",
        "--name",
        "job",
        "--replace",
        "--cidfile=/c",
        "--env",
        "A=1 2",
        "-v",
        "/cache",
    ]
    notes = ["--annotation", "ocihook.io/restore-from=latest", "--annotation=ocihook.io/mode=store"]
    recipe = parse_recipe(config(*words, *notes, "library/job:1", "work", "--name", "x"), "job")
    assert recipe.options == ("--env", "A=1 2", "-v", "/cache", "--annotation=ocihook.io/mode=store")
    assert (recipe.image, recipe.arguments) == (IMAGE, ("work", "--name", "x"))


@pytest.mark.parametrize(
    ("command", "more"),
    [
        (("container", "create", "--name", "job", "--memory=1g", "job:1"), {}),  # what runs is the image's own
        (("create", "--memory=1g", IMAGE[:12]), {}),
        (("run", "--memory=1g", "alias"), {"RawImageName": "alias"}),
    ],
)
def test_the_image_is_found_however_it_was_called(command: tuple[str, ...], more: dict[str, str]) -> None:
    recipe = parse_recipe(config(*command, **more), "job")
    assert (recipe.options, recipe.image, recipe.arguments) == (("--memory=1g",), IMAGE, ())


@pytest.mark.parametrize(
    ("options", "sources", "directory"),
    [
        (("-v", "./data:/data"), {"/data": "/srv/one/data"}, "/srv/one"),
        (("--volume=./a/b:/data:ro", "-v", ".:/all"), {"/data": "/srv/one/a/b", "/all": "/srv/one"}, "/srv/one"),
        (("--mount", "type=bind,src=./data,dst=/data/"), {"/data": "/srv/data"}, "/srv"),
        (("-v", "./data:/data", "-v", "./x:/x"), {"/data": "/srv/one/data", "/x": "/srv/two/x"}, ""),  # changed since
        (("-v", "../data:/data"), {"/data": "/srv/data"}, ""),
        (("-v", "/srv/data:/data", "-v", "named:/n", "--tmpfs", "/t"), {"/data": "/srv/data", "/n": "/v"}, ""),
        (("-v", "./data:/data"), {}, ""),
    ],
)
def test_relative_volumes_say_where_podman_was_called(
    options: tuple[str, ...], sources: dict[str, str], directory: str
) -> None:
    mounts = [{"destination": place, "source": source} for place, source in sources.items()]
    made = {**config("run", *options, "job:1", "work", "--name", "x"), "spec": {"mounts": mounts}}
    assert parse_recipe(made, "job").directory == directory


@pytest.mark.parametrize("command", [(), ("run", "other:1", "work"), ("start", "job:1"), ("run",)])
def test_what_does_not_say_how_it_was_made_is_refused(command: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedError, match="by which command container job was made"):
        parse_recipe(config(*command), "job")


def known(number: int, name: str, **more: str) -> Known:
    container = ContainerRef(id=f"{number}" * 64, engine="podman", runtime="runc", name=name, **more)
    return Known(f"20261123T12000{number}Z-0123abcd", container, f"2026-11-23T12:00:0{number}Z")


def test_a_checkpoint_is_found_by_id_or_container(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [known(2, "job"), known(1, "job"), known(3, "two", member="a"), known(4, "two", member="b")]
    monkeypatch.setattr(podman_run, "known_checkpoints", lambda *_: there)

    def find(name: str) -> Known:
        return find_checkpoint(name, Settings(), ENDLESS)

    assert find("job") == find("2" * 12) == find(there[0].id) == there[0]
    assert find(there[1].id) == find("1" * 12) == there[1]
    assert find("b") == there[3]
    with pytest.raises(OcihookError, match=f"several containers are called two. Name .*{there[2].id}.*{there[3].id}"):
        find("two")
    for name in ("nobody", "2" * 11, "/some/path"):
        with pytest.raises(NoCheckpoint, match=f"has a checkpoint {name}, or of a container {name}"):
            find(name)


class Node:
    """A node whose podman only plays one."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.drop_in = path, path / "50-ocihook.conf"
        self.drop_in.write_text(f'[engine.runtimes]\nocihook = ["{path}/ocihook-crun"]\n')
        (path / "ocihook-runc").touch()
        self.inspected: dict[str, dict[str, Any]] = {}
        self.fails = ""
        self.calls: list[list[str]] = []
        (path / "bin").mkdir()
        podman = path / "bin/podman"
        podman.write_text(f'#!/bin/sh\nexec {Path("/bin/sh")} {path}/podman.sh "$@"\n')
        podman.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path}/bin:/usr/bin:/bin")
        monkeypatch.setattr(podman_run, "PODMAN_DROP_IN", self.drop_in)
        monkeypatch.setattr(podman_run, "known_checkpoints", lambda *_: [known(1, "job")])
        monkeypatch.setattr("ocihook.wire.RUNTIME_DIR", str(path / "run"))

    def run(self, *words: str) -> Result:
        for name, value in self.inspected.items():
            (self.path / f"{name}.json").write_text(json.dumps([value]))
        (self.path / "podman.sh").write_text(f"""
for last; do :; done
echo "$*" >> {self.path}/calls
case "$*" in
*inspect*) cat {self.path}/$last.json 2>/dev/null || {{ echo 'Error: no such object' >&2; exit 125; }} ;;
*run*) for word; do case $word in --cidfile=*) echo new > ${{word#*=}} ;; esac; done
    [ -z '{self.fails}' ] || {{ echo '{self.fails}' >&2; exit 126; }} ;;
esac
""")
        return CliRunner().invoke(cli, ["run", *words])

    def called(self, verb: str) -> list[str]:
        return [line for line in (self.path / "calls").read_text().splitlines() if f" {verb} " in f" {line} "]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, monkeypatch)


def test_a_container_is_made_as_the_other_one_was(node: Node) -> None:
    made = {"CreateCommand": ["podman", "run", "--env=A", "--name=job", "job:1"], "Cmd": ["image's"]}
    node.inspected = {"1" * 64: {"Config": made, "Image": IMAGE, "ImageName": "localhost/job:1"}, IMAGE: {}}
    result = node.run("--from", "job", "--name", "again")
    assert result.exit_code == 0, result.output + repr(result.exception)
    (call,) = node.called("run")
    assert call.startswith(f"--runtime {node.path}/ocihook-runc run --detach --cidfile=")
    assert f"--annotation=ocihook.io/restore-from={known(1, 'job').id}" in call
    assert call.endswith(f"--annotation=ocihook.io/on-restore-error=fail --name=again --env=A {IMAGE}")
    assert "container again (new) resumes from checkpoint" in result.output


@pytest.mark.parametrize("case", ["gone", "name", "handler", "program", "image", "annotation", "running", "refused"])
def test_what_is_in_the_way_is_said(node: Node, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words, expected = ["--from", "job", "--", "image"], ""
    if case == "gone":
        words, expected = words[:2], "is not here any more, and its checkpoint does not say how it was made"
    elif case == "name":
        node.inspected, expected = {"job": {}}, "there is a container job here"
    elif case == "handler":
        node.drop_in.unlink()
        expected = "podman does not know the runtime handler here"
    elif case == "program":
        (node.path / "ocihook-runc").unlink()
        expected = "ocihook-runc, and runc has made the checkpoint"
    elif case == "image":
        made = {"CreateCommand": ["podman", "run", "job:1"]}
        node.inspected = {"1" * 64: {"Config": made, "Image": IMAGE, "ImageName": "localhost/job:1"}}
        words, expected = words[:2], "image localhost/job:1 (555555555555) is not here"
    elif case == "annotation":
        words, expected = [*words[:3], "--annotation=ocihook.io/restore-from=latest", "image"], "is set by --from"
    elif case == "running":
        me = Process.find(1)
        kept = containers.Kept(
            container=known(2, "twin").container,
            bundle=node.path,
            program=Path("runc"),
            prefix=(),
            domain="_node",
            checkpoint=known(1, "job").id,
            init=me,
        )
        monkeypatch.setattr(containers, "all_kept", lambda: [kept])
        expected = "runs already, as container twin (222222222222)"
    else:
        node.fails = "Error: OCI runtime error: container job (new) is not restored: why it is not. Nothing was started"
        expected = "is not restored, and no container is left: why it is not"
    result = node.run(*words)
    assert isinstance(result.exception, OcihookError)
    assert expected in str(result.exception)
    assert "Nothing was started" not in str(result.exception)
    assert bool((node.path / "calls").exists() and node.called("rm")) == (case == "refused")
