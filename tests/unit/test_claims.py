"""Who of several nodes may restore a checkpoint: over every kind of remote one at most, and none that has ended."""

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ocihook.remote.s3  # noqa: F401 - once, and not in each process that claims
from ocihook import wire
from ocihook.config import Settings
from ocihook.errors import RemoteError, RestoreError
from ocihook.linux.patience import ENDLESS, Patience
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.remote.location import open_remote
from ocihook.remote.objects import ObjectRemote
from ocihook.remote.remote import ClaimBlob, Remote
from ocihook.runtime import claims, containers
from ocihook.runtime.announced import announce
from ocihook.runtime.claims import (
    Claim,
    end_claim,
    has_claims,
    has_due_claims,
    is_claimed,
    make_claim,
    note_claim,
    release,
    tend_claims,
)
from ocihook.runtime.containers import Kept
from ocihook.runtime.stop_record import Stop, write_stop
from ocihook.store.thin import Thin
from tests.fakes.object_storage import make_bucket, object_storage
from tests.fakes.registry import Registry, answers

CHECKPOINT = Thin("team", "20261123T120000Z-0123abcd")


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_UNDECIDED_S", 0.3)
    monkeypatch.setattr(wire, "RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "remote").mkdir()
    return str(tmp_path / "remote")


@pytest.fixture
def registry() -> Iterator[Registry]:
    made = Registry()
    yield made
    made.close()


@pytest.fixture(params=["directory", "bucket", "registry"])
def location(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with contextlib.ExitStack() as stack:
        if request.param == "directory":
            yield request.getfixturevalue("directory")
        elif request.param == "registry":
            yield f"oci://{request.getfixturevalue('registry').address}/team/job?plain_http=yes"
        else:
            yield make_bucket(stack.enter_context(object_storage()), "checkpoints")


class Site:
    """A node, as far as claims go."""

    def __init__(self, root: Path, location: str) -> None:
        root.mkdir()
        self.settings = Settings(store_dir=str(root), remote=location)
        self.store_dir = root

    def claim(self, name: str, pod: str = "", uid: str = "") -> Path:
        container = ContainerRef(id=name, name=name, pod_name=pod, pod_namespace="team" if pod else "", pod_uid=uid)
        path = note_claim(CHECKPOINT, container, self.settings)
        make_claim(path, ENDLESS)
        return path

    def run(self, name: str) -> None:
        """Have a container run that was restored from the checkpoint."""
        kept = containers.Kept(
            container=ContainerRef(id=name),
            bundle=self.store_dir,
            program=self.store_dir,
            prefix=(),
            domain="team",
            checkpoint=CHECKPOINT.checkpoint_id,
            init=Process.find(os.getpid()),
        )
        containers.keep(kept)

    def there(self) -> list[str]:
        """Return the containers that have a claim at the remote."""
        found = open_remote(self.settings.remote, "team").claims(CHECKPOINT.checkpoint_id)
        return sorted(claims._decode(blob.data, "").container.id for blob in found)


@pytest.fixture
def sites(tmp_path: Path, location: str) -> tuple[Site, Site]:
    return Site(tmp_path / "one", location), Site(tmp_path / "two", location)


def test_one_node_has_a_checkpoint_until_its_container_ends(
    sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = sites
    path = one.claim("first", pod="train-0-aaaaa")
    with pytest.raises(RestoreError, match=r"on node .*, as container team/train-0-aaaaa/first") as failure:
        two.claim("second", pod="train-0-bbbbb")
    assert "stop that one first" in failure.value.hint
    assert one.there() == ["first"], "who is refused leaves nothing"
    end_claim(path)
    assert (one.there(), has_claims(one.store_dir)) == ([], False)
    two.claim("second", pod="train-0")
    one.claim("third", pod="train-0", uid="new")  # a cluster has one pod of that name: the other one is gone
    assert one.there() == ["third"]
    one.claim("fourth")  # on one node the processes themselves are looked at
    assert one.there() == ["fourth"]
    with pytest.raises(RestoreError, match="as container fourth"):
        two.claim("fifth")
    monkeypatch.setattr(claims, "LASTS_S", -2.0)  # of a node that has renewed nothing for so long
    two.claim("sixth")
    assert one.there() == ["sixth"]


def test_claims_of_a_lost_node_are_released(sites: tuple[Site, Site], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = sites
    names, stopped = os.uname(), kept("x")
    lost = os.uname_result((names.sysname, "lost", names.release, names.version, names.machine))
    with monkeypatch.context() as on_lost_node:
        on_lost_node.setattr(os, "uname", lambda: lost)
        one.claim("first", pod="train-0-aaaaa")
        containers.keep(stopped)
        write_stop("x", Stop(words=()))
        announce(stopped, None, one.settings)
    newcomer = ContainerRef(id="second", pod_name="train-0-bbbbb", pod_namespace="team")
    with pytest.raises(RestoreError, match=f"ocihook store release {CHECKPOINT.checkpoint_id}"):
        two.claim("second", pod="train-0-bbbbb")
    assert is_claimed(CHECKPOINT, newcomer, two.settings, ENDLESS)
    assert release(two.settings, node="other") == []
    assert release(two.settings, checkpoint_id="20261123T120000Z-ffffffff") == []
    released = release(two.settings, node="lost")
    assert sorted((row.domain, row.host) for row in released) == [("team", "lost")] * 2
    assert {row.of.partition("-")[0] for row in released} == {"stop", CHECKPOINT.checkpoint_id.partition("-")[0]}
    assert not is_claimed(CHECKPOINT, newcomer, two.settings, ENDLESS)
    two.claim("second", pod="train-0-bbbbb")
    open_remote(two.settings.remote, "team").write_claim(CHECKPOINT.checkpoint_id, "malformed", b"{")
    assert len(release(two.settings, checkpoint_id=CHECKPOINT.checkpoint_id)) == 2
    assert one.there() == []


def kept(name: str) -> Kept:
    return Kept(container=ContainerRef(id=name), bundle=Path("/"), program=Path("/"), prefix=(), domain="team")


def test_an_agent_renews_a_claim_while_its_container_runs(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = Site(tmp_path / "one", directory)
    one.run("job")
    path = one.claim("job")
    assert not has_due_claims(one.store_dir)
    monkeypatch.setattr(claims, "RENEWED_EVERY_S", -1.0)
    assert has_due_claims(one.store_dir)
    (file,) = Path(directory).glob("domains/team/claims/*")
    os.utime(file, (0, 0))
    (blob,) = open_remote(directory, "team").claims(CHECKPOINT.checkpoint_id)
    tend_claims(one.store_dir)
    (renewed,) = open_remote(directory, "team").claims(CHECKPOINT.checkpoint_id)
    assert (renewed.token, renewed.data) == (blob.token, blob.data)
    assert renewed.written_s > blob.written_s
    monkeypatch.undo()

    monkeypatch.setattr(wire, "RUNTIME_DIR", str(tmp_path / "run"))
    containers.forget("job")  # it has ended, and the remote is away
    away = tmp_path / "away"
    Path(directory).rename(away)
    assert has_due_claims(one.store_dir)
    with caplog.at_level(logging.ERROR):
        tend_claims(one.store_dir)
    assert "is no directory" in caplog.text
    assert has_claims(one.store_dir)
    assert not has_due_claims(one.store_dir), "it is not tried all the time"
    away.rename(directory)
    claims._write(path, replace(claims._read(path), next_s=0))
    tend_claims(one.store_dir)
    assert (one.there(), has_claims(one.store_dir)) == ([], False)


def test_an_agent_stays_as_long_as_there_is_a_claim(directory: str, tmp_path: Path) -> None:
    from ocihook.agent.listening import Listener
    from ocihook.agent.server import Agent

    one = Site(tmp_path / "one", directory)
    one.run("job")
    one.claim("job")
    run_dir = tmp_path / "agent"
    run_dir.mkdir()
    pid = os.fork()
    if pid == 0:
        status = 1
        with contextlib.suppress(BaseException):
            listener = Listener(run_dir / "agent.sock", socket.SOCK_SEQPACKET, backlog=1)
            Agent(listener, run_dir, lambda: one.settings).run(idle_timeout_s=0.1)
            status = 0
        os._exit(status)
    assert not Patience(timeout_s=2).until(lambda: os.waitpid(pid, os.WNOHANG) != (0, 0)), "it has to renew it"
    assert one.there() == ["job"]
    containers.forget("job")
    assert os.waitpid(pid, 0)[1] == 0, "it leaves"
    assert (one.there(), has_claims(one.store_dir)) == ([], False)


def test_what_a_remote_that_stays_away_has_is_given_up(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Site(tmp_path / "one", directory)
    one.claim("job")
    Path(directory).rename(tmp_path / "away")
    monkeypatch.setattr(claims, "LASTS_S", 0.0)
    tend_claims(one.store_dir)
    assert not has_claims(one.store_dir), "else an agent would wait for it for ever"


def test_a_remote_that_does_not_answer_lets_nobody_run(directory: str, tmp_path: Path) -> None:
    Path(directory).rmdir()
    with pytest.raises(RemoteError, match="is no directory"):
        Site(tmp_path / "one", directory).claim("job")


@pytest.mark.parametrize("garbage", [b"", b"[]", b"{}", b'{"node": 1}'])
def test_what_cannot_be_read_is_somebody_s(directory: str, tmp_path: Path, garbage: bytes) -> None:
    open_remote(directory, "team").write_claim(CHECKPOINT.checkpoint_id, "x", garbage)
    with pytest.raises(RemoteError, match="malformed"):
        Site(tmp_path / "one", directory).claim("job")


def test_a_registry_that_removes_nothing(registry: Registry, tmp_path: Path) -> None:
    one = Site(tmp_path / "one", f"oci://{registry.address}/team/job?plain_http=yes")
    end = one.claim("job")
    registry.fail("DELETE", answers(405))
    end_claim(end)
    assert one.there() == []
    Site(tmp_path / "two", one.settings.remote).claim("again")


def test_a_prune_removes_claims_of_nodes_that_are_gone(directory: str, tmp_path: Path) -> None:
    Site(tmp_path / "one", directory).claim("gone")
    (file,) = Path(directory).glob("domains/team/claims/*")
    os.utime(file, (0, 0))
    other = Thin("team", "20261123T120000Z-0123abce")
    open_remote(directory, "team").write_claim(other.checkpoint_id, "x", b"{}")
    open_remote(directory, "team").remove_rubbish(set)
    assert [path.name for path in file.parent.iterdir()] == [f"{other.checkpoint_id}.x"]


class Watched(ObjectRemote):
    """A remote at which something happens before somebody looks for the first time."""

    def __init__(self, remote: ObjectRemote, meanwhile: "list[Claim]") -> None:
        super().__init__(remote._blobs, "team")
        self.meanwhile = meanwhile

    def claims(self, checkpoint_id: str) -> list[ClaimBlob]:
        while self.meanwhile:
            other = self.meanwhile.pop()
            super().write_claim(checkpoint_id, other.token, claims._encode(other.holder))
        return super().claims(checkpoint_id)


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_at_once_the_first_by_name_has_it(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_first: bool
) -> None:
    """Both have written when the first of them looks. The other one withdraws once it has looked, too."""
    one, two = Site(tmp_path / "one", directory), Site(tmp_path / "two", directory)
    mine = claims._read(note_claim(CHECKPOINT, ContainerRef(id="mine"), one.settings))
    theirs = claims._read(note_claim(CHECKPOINT, ContainerRef(id="theirs"), two.settings))
    mine = replace(mine, token="1" if is_first else "3")
    theirs = replace(theirs, token="2")
    remote = open_remote(directory, "team")
    assert isinstance(remote, ObjectRemote)
    looked: list[Remote] = []

    def opened(claim: Claim) -> Remote:
        looked.append(Watched(remote, [theirs]))
        return looked[-1]

    monkeypatch.setattr(claims, "_remote", opened)
    monkeypatch.setattr(claims, "_UNDECIDED_S", 600.0)
    if is_first:
        monkeypatch.setattr(Patience, "sleep", lambda *_: remote.remove_claim(CHECKPOINT.checkpoint_id, "2"))
        claims._claim(mine)
        assert one.there() == ["mine"]
    else:
        with pytest.raises(RestoreError, match="as container theirs"):
            claims._claim(mine)
        assert one.there() == ["theirs"]


def test_never_two_at_once(directory: str, tmp_path: Path) -> None:
    """Processes that race for it, as containers of different nodes would."""
    racers = [Site(tmp_path / f"node{number}", directory) for number in range(4)]
    for _ in range(5):
        reader, writer = os.pipe()
        pids = []
        for number, racer in enumerate(racers):
            pid = os.fork()
            if pid == 0:
                status = 1
                with contextlib.suppress(RestoreError):
                    os.close(writer)
                    os.read(reader, 1)  # all at once
                    racer.claim(f"job{number}")
                    status = 0
                os._exit(status)
            pids.append(pid)
        os.close(reader)
        os.close(writer)
        won = [f"job{at}" for at, pid in enumerate(pids) if os.waitpid(pid, 0)[1] == 0]
        assert len(won) <= 1
        assert racers[0].there() == won
        for racer in racers:
            tend_claims(racer.store_dir)
        assert racers[0].there() == []


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"checkpoint": 1}'])
def test_a_damaged_record_of_a_claim_leaves_the_claim_to_its_container(
    directory: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    one = Site(tmp_path / "one", directory)
    one.run("job")
    path = one.claim("job")
    path.write_bytes(damage)
    assert has_claims(one.store_dir)
    assert has_due_claims(one.store_dir)
    (before,) = open_remote(directory, "team").claims(CHECKPOINT.checkpoint_id)
    (file,) = Path(directory).glob("domains/team/claims/*")
    os.utime(file, (0, 0))
    with caplog.at_level(logging.ERROR):
        tend_claims(one.store_dir, directory)
    assert f"{path} cannot be read" in caplog.text
    (renewed,) = open_remote(directory, "team").claims(CHECKPOINT.checkpoint_id)
    assert renewed.token == before.token
    assert renewed.written_s > 0
    assert not has_due_claims(one.store_dir), "its record is whole again"
    path.write_bytes(damage)
    (containers.directory_of("job") / containers.RECORD_NAME).write_bytes(damage)
    tend_claims(one.store_dir, directory)
    assert one.there() == ["job"], "a container whose record is damaged may run from it"
    containers.forget("job")
    path.write_bytes(damage)
    tend_claims(one.store_dir, directory)
    assert (one.there(), has_claims(one.store_dir)) == ([], False)


def test_a_claim_is_held_as_long_as_a_process_of_its_container_runs(directory: str, tmp_path: Path) -> None:
    """Where a container shares pids its first process may end before others do."""
    one = Site(tmp_path / "one", directory)
    one.run("job")
    kept = containers.read("job")
    assert kept is not None
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    (cgroup / "cgroup.procs").write_text("7\n")
    containers.keep(replace(kept, init=Process(os.getpid(), 1), cgroup=cgroup))
    one.claim("job")
    tend_claims(one.store_dir)
    assert one.there() == ["job"]
    (cgroup / "cgroup.procs").write_text("")
    assert has_due_claims(one.store_dir)
    tend_claims(one.store_dir)
    assert one.there() == []
