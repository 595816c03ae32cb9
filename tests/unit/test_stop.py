"""`kill`, `state` and `delete` of containers that the handler stops, and the agent's part in it."""

import contextlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ocihook import wire
from ocihook.checkpoints.belongings import note_call, read_call, stopping_dir
from ocihook.checkpoints.complete import wait_complete
from ocihook.config import Settings
from ocihook.errors import ConfigError, OcihookError
from ocihook.linux.procfs import Process
from ocihook.model import ContainerRef
from ocihook.runtime import containers, dumping, stop, suspending
from ocihook.runtime.call import Call
from ocihook.runtime.gang_call import Listening
from ocihook.runtime.stop_record import (
    CHECKPOINTED,
    SIGNALLED,
    Stop,
    is_stopping,
    read_stop,
    record_of,
    stop_signals,
    stops_under_way,
    write_stop,
)
from ocihook.runtime.stopping import Stopping, remove_stale, withdraw
from ocihook.store.store import Store
from ocihook.store.thin import Thin
from tests.unit.test_stored_belongings import stop as stop_in_store

ID = "c" * 64
CONTAINER = ContainerRef(id=ID, engine="podman", runtime="runc", name="job")


# As a runtime does, it fails if it cannot write its log.
RUNTIME = """#!/bin/sh
case $1 in --log=*) : > "${1#--log=}" || exit 1; shift ;; esac
echo "$*" >> @CALLED@
[ "$1" != state ] || exit 1
"""


class PassedOn(Exception):
    """The runtime itself was called."""


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with one container of ours and a runtime that notes what it is called with."""
    monkeypatch.setattr(wire, "RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(stop, "load_settings", lambda: settings(tmp_path))

    def pass_on(_call: Call) -> NoReturn:
        raise PassedOn

    monkeypatch.setattr(Call, "pass_on", pass_on)
    program = tmp_path / "runc"
    program.write_text(RUNTIME.replace("@CALLED@", str(tmp_path / "called")))
    program.chmod(0o755)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    config = {"annotations": {"ocihook.io/checkpoint-on-stop": "true"}, "root": {"path": "rootfs"}}
    (bundle / "config.json").write_text(json.dumps(config))
    kept = containers.Kept(container=CONTAINER, bundle=bundle, program=program, prefix=(), domain="_node")
    containers.keep(kept)
    return tmp_path


def settings(node: Path) -> Settings:
    return Settings(store_dir=str(node / "store"), workers=1)


def call(node: Path, *words: str) -> Call:
    return Call.parse(node / "runc", [*words])


def called(node: Path) -> list[str]:
    path = node / "called"
    return path.read_text().splitlines() if path.exists() else []


def answer(status: int, message: str = "") -> Callable[[bytes], tuple[int, str]]:
    def ask(packet: bytes) -> tuple[int, str]:
        assert wire.Request.decode(packet).image_dir == ID
        assert wire.Request.decode(packet).stage == wire.STOP_STAGE
        return status, message

    return ask


def never(_packet: bytes) -> tuple[int, str]:
    raise AssertionError("nobody is to be asked")


def no_agent(_packet: bytes) -> tuple[int, str]:
    raise ConnectionError("nobody listens")


@pytest.mark.parametrize("signal", [(), ("15",), ("TERM",), ("SIGTERM",)])
def test_the_stop_signal_becomes_a_checkpoint(node: Path, signal: tuple[str, ...]) -> None:
    assert stop.kill(call(node, "kill", ID, *signal), answer(0)) == 0
    assert read_stop(ID) == Stop(words=("kill", ID, *signal))
    assert list(stops_under_way()) == [ID]
    assert is_stopping("_node", CONTAINER)
    assert not is_stopping("team", CONTAINER)
    assert called(node) == []


def test_kill_ends_well_though_the_checkpoint_failed(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stop.kill(call(node, "kill", ID, "15"), answer(1, "the disk is full")) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("signal", ["9", "HUP", "USR1", "0"])
def test_other_signals_are_the_runtimes(node: Path, signal: str) -> None:
    with pytest.raises(PassedOn):
        stop.kill(call(node, "kill", ID, signal), never)


def test_a_container_that_is_held_or_not_ours_or_does_not_want_it(node: Path) -> None:
    with pytest.raises(PassedOn):
        stop.kill(call(node, "kill", "other", "15"), never)
    held = containers.directory_of(ID) / containers.HELD_NAME
    held.touch()
    with pytest.raises(PassedOn):
        stop.kill(call(node, "kill", ID, "15"), never)
    held.unlink()
    for notes in ({}, {"ocihook.io/checkpoint-on-stop": "true", "ocihook.io/mode": "off"}):
        (node / "bundle/config.json").write_text(json.dumps({"annotations": notes}))
        with pytest.raises(PassedOn):
            stop.kill(call(node, "kill", ID, "15"), never)


@pytest.mark.parametrize("broken", ["settings", "config"])
def test_a_configuration_that_was_broken_since_is_for_the_agent_to_report(
    node: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    def fail() -> Settings:
        raise ConfigError("mode = 'of' is none")

    kept = containers.read(ID)
    assert kept is not None
    containers.keep(replace(kept, stop_signals=("15", "TERM", "QUIT")))
    if broken == "settings":
        monkeypatch.setattr(stop, "load_settings", fail)
    else:
        (node / "bundle/config.json").write_text("{")
    with caplog.at_level(logging.WARNING), pytest.raises(PassedOn):
        stop.kill(call(node, "kill", ID, "HUP"), never)
    assert ("mode = 'of' is none" if broken == "settings" else "config.json is not JSON") in caplog.text
    assert stop.kill(call(node, "kill", ID, "QUIT"), answer(1, "the configuration is broken")) == 0
    containers.keep(replace(kept, stop_signals=()))
    with pytest.raises(PassedOn):
        stop.kill(call(node, "kill", ID, "15"), never)


def test_kill_waits_for_a_stop_that_is_under_way(node: Path) -> None:
    write_stop(ID, Stop(words=("kill", ID, "15")))
    assert stop.kill(call(node, "kill", ID, "9"), answer(0)) == 0
    with pytest.raises(PassedOn):
        stop.kill(call(node, "kill", ID, "9"), answer(1, "failed"))
    with pytest.raises(PassedOn):
        stop.kill(call(node, "kill", ID, "HUP"), never)
    write_stop(ID, Stop(words=("kill", ID, "15"), outcome=SIGNALLED))
    with pytest.raises(PassedOn):
        stop.kill(call(node, "kill", ID, "9"), never)


@pytest.mark.parametrize("damage", [b"", b"[]", b"{}", b"{"])
def test_a_damaged_record_of_a_stop_is_one_that_is_under_way(node: Path, damage: bytes) -> None:
    """Else a new container would resume from an older checkpoint meanwhile."""
    write_stop(ID, Stop(words=("kill", ID, "15")))
    record_of(ID).write_bytes(damage)
    assert is_stopping("_node", CONTAINER)
    assert read_stop(ID) == Stop(words=("kill", ID, "TERM"))


def test_without_an_agent_the_signal_is_delivered(node: Path) -> None:
    with pytest.raises(PassedOn):
        stop.kill(call(node, "kill", ID, "15"), no_agent)


def test_what_has_ended_is_answered_for(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (containers.directory_of(ID) / containers.ENDED_NAME).touch()
    assert stop.kill(call(node, "kill", ID, "9"), never) == 0
    assert stop.state(call(node, "state", ID)) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["id"], told["status"], told["pid"]) == (ID, "stopped", 0)
    assert stop.delete(call(node, "delete", ID), never) == 0
    assert called(node) == [f"delete --force {ID}"]
    assert containers.read(ID) is None


def test_what_runs_is_deleted_by_the_runtime(node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (node / "runc").write_text("#!/bin/sh\necho it runs >&2; exit 1\n")
    assert stop.delete(call(node, "delete", ID), never) == 1
    assert capsys.readouterr().err == "it runs\n"
    assert containers.read(ID) is not None
    (node / "runc").write_text("#!/bin/sh\n")
    write_stop(ID, Stop(words=("kill", ID, "15")))
    assert stop.delete(call(node, "delete", "--force", ID), answer(0)) == 0
    assert containers.read(ID) is None


def test_the_signal_that_an_image_wants_is_a_stop() -> None:
    config = {"annotations": {"org.opencontainers.image.stopSignal": "SIGQUIT"}}
    assert stop_signals(config) == ("15", "TERM", "QUIT")
    assert stop_signals({}) == ("15", "TERM")


def test_the_agent_delivers_the_signal_if_it_cannot_checkpoint(node: Path) -> None:
    write_stop(ID, Stop(words=("kill", ID, "15")))
    stopping = Stopping(ID, lambda: settings(node))
    status, message = stopping.finish()
    assert (status, message) == (
        1,
        "container job (cccccccccccc) is stopped without a checkpoint: it is not known to its runtime",
    )
    assert called(node) == [f"state {ID}", f"kill {ID} 15"]
    found = read_stop(ID)
    assert found is not None
    assert found.outcome == SIGNALLED
    assert Stopping(ID, lambda: settings(node)).finish() == (1, message)  # asked again, nothing is done twice
    assert len(called(node)) == 2
    assert not stopping_dir(node / "store", ID).exists()


def test_a_container_whose_engine_does_not_wait_is_deleted_when_its_stop_is_over(node: Path) -> None:
    """A shim was killed: its engine has removed the bundle, with the runtime's log."""
    words = ("--log", str(node / "bundle/log"), "kill", ID, "15")
    kept = containers.read(ID)
    assert kept is not None
    containers.keep(replace(kept, prefix=words[:2]))
    write_stop(ID, Stop(words=words))
    shutil.rmtree(node / "bundle")
    stopping = Stopping(ID, lambda: settings(node))
    stopping.finish()
    stopping.delete_if_left()
    assert called(node) == [f"state {ID}", f"kill {ID} 15", f"delete --force {ID}"]
    assert containers.read(ID) is None


def test_one_whose_engine_waits_is_deleted_by_it(node: Path) -> None:
    write_stop(ID, Stop(words=("kill", ID, "15")))
    stopping = Stopping(ID, lambda: settings(node))
    stopping.finish()
    stopping.delete_if_left()
    assert containers.read(ID) is not None


def test_a_stop_that_is_over_is_told_again(node: Path) -> None:
    write_stop(ID, Stop(words=("kill", ID, "15"), outcome=CHECKPOINTED))
    assert Stopping(ID, lambda: settings(node)).finish() == (0, "")
    assert list(stops_under_way()) == []


def test_none_that_is_to_be_stopped(node: Path) -> None:
    with pytest.raises(OcihookError, match="is not being stopped"):
        Stopping(ID, lambda: settings(node))


def test_what_a_boot_has_left_is_removed(node: Path) -> None:
    for name in (ID, "gone", "over"):
        stopping_dir(node / "store", name).mkdir(parents=True)
    write_stop(ID, Stop(words=("kill", ID, "15")))
    remove_stale(settings(node))
    assert [path.name for path in (node / "store/stopping").iterdir()] == [ID]
    remove_stale(Settings(store_dir=str(node / "none")))


def test_a_checkpoint_of_what_ran_on_is_withdrawn(node: Path) -> None:
    upper = node / "upper"
    upper.mkdir()
    (upper / "file").write_bytes(os.urandom(5000))
    domain, manifest = stop_in_store(Store(node / "store"), node / "images", upper)
    wait_complete(domain, manifest.id, workers=1)
    withdraw(settings(node), Thin(domain.name, manifest.id))
    assert domain.checkpoint_ids() == []
    withdraw(settings(node), Thin(domain.name, manifest.id))


_PAIR = {
    "ocihook.io/checkpoint-on-stop": "true",
    "ocihook.io/gang": "job",
    "ocihook.io/gang-size": "2",
}


def keep(node: Path, name: str, notes: dict[str, str]) -> str:
    """Keep a container with a bundle of its own; return its id."""
    bundle = node / name
    (bundle / "rootfs").mkdir(parents=True)
    (bundle / "config.json").write_text(json.dumps({"annotations": notes, "root": {"path": "rootfs"}}))
    container = ContainerRef(id=name * 64, engine="podman", runtime="runc", name=name)
    containers.keep(containers.Kept(container=container, bundle=bundle, program=node / "runc", prefix=(), domain="x"))
    return container.id


def test_a_member_of_a_gang_that_another_one_calls(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is dumped, and left running, if it wants that and is not being stopped itself; its stop waits for that."""
    monkeypatch.setattr("ocihook.runtime.dumping.check_sizes", lambda *_: None)
    notes = {**_PAIR, "ocihook.io/on-member-stop": "checkpoint"}
    other, leaving, stranger, quiet = (keep(node, name, notes) for name in "aefd")
    (node / "f/config.json").write_text(json.dumps({"annotations": {**notes, "ocihook.io/gang": "theirs"}}))
    (node / "d/config.json").write_text(json.dumps({"annotations": _PAIR}))
    write_stop(leaving, Stop(words=("kill", leaving)))
    (node / "runc").write_text(f'#!/bin/sh\necho "$*" >> {node}/called\nuntil [ -e {node}/go ]; do sleep 0.05; done\n')
    place = stopping_dir(node / "store", other)
    stale = stopping_dir(node / "store", "0" * 64)
    stale.mkdir(parents=True)
    note_call(stale, "an earlier one")
    asked: list[dict[str, Any]] = []

    def ask(_settings: Settings, request: dict[str, Any]) -> object:
        asked.append(request)
        if len(asked) == 1:
            raise ConnectionRefusedError
        if len(asked) == 2:
            return [["", "job", "0123"]]
        if len(asked) == 3:
            assert read_call(place) == "0123"
            (node / "go").touch()
        if not place.exists():
            for name in (other, leaving, stranger):
                containers.forget(name)
        return []

    monkeypatch.setattr("ocihook.runtime.gang_call._RETRY_S", 0)
    Listening(lambda: settings(node), ask).serve()
    assert sorted(asked[1]["gangs"]) == [["", "job", ""], ["", "theirs", ""]]
    assert sorted(asked[2]["gangs"]) == [["", "job", "0123"], ["", "theirs", ""]]
    assert "wait_s" in asked[2], "while it dumps it does not wait for long"
    assert [line.split()[-2:] for line in called(node)] == [["--leave-running", other]]
    assert not list((node / "store/stopping").iterdir())
    assert containers.read(quiet) is not None


@pytest.mark.parametrize("tracks", [True, False])
def test_memory_is_tracked_for_one_dump_alone(node: Path, monkeypatch: pytest.MonkeyPatch, *, tracks: bool) -> None:
    """If the kernel can: the runtime is given an earlier dump that is none."""
    monkeypatch.setattr("ocihook.linux.soft_dirty.works", lambda: tracks)
    (node / "runc").write_text(f'#!/bin/sh\necho "$*" >> {node}/called\n')
    kept = containers.read(ID)
    assert kept is not None
    place = stopping_dir(node / "store", ID)
    place.mkdir(parents=True)
    assert dumping.begin(kept, place).wait() == 0
    named = dict(itertools.pairwise(called(node)[0].split()))
    assert ("--parent-path" in named) == tracks
    if tracks:
        assert not Path(named["--parent-path"]).is_absolute()
        assert os.path.normpath(Path(named["--image-path"], named["--parent-path"])) == "/"


def test_a_stop_waits_for_a_dump_with_the_gang(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And removes what one has left whose agent was killed."""
    monkeypatch.setattr("ocihook.runtime.stopping._ENDING_S", 0.05)
    stopped = keep(node, "a", _PAIR)
    place = stopping_dir(node / "store", stopped)
    place.mkdir(parents=True)
    note_call(place, "0123")
    (node / "runc").write_text(
        f'#!/bin/sh\necho "$*" >> {node}/called\n[ ! -e {place} ] || echo early >> {node}/called\n'
    )
    write_stop(stopped, Stop(words=("kill", stopped, "15")))
    assert Stopping(stopped, lambda: settings(node)).finish()[0] == 1
    assert "early" not in called(node)
    assert called(node)[0].endswith(f"state {stopped}")


def test_whoever_shares_a_volume_that_is_saved_is_named(node: Path) -> None:
    """A container that runs and has it, too: not one that has ended, nor one of another volume, nor an empty one."""
    volumes = {name: node / f"pods/p/volumes/kubernetes.io~empty-dir/{name}" for name in ("cache", "other", "empty")}
    for name, place in volumes.items():
        place.mkdir(parents=True)
        if name != "empty":
            (place / "file").touch()
    kept = containers.read(ID)
    assert kept is not None
    for name, has in (("job", [*volumes]), ("beside", ["cache", "empty"]), ("ended", ["cache"]), ("gone", ["cache"])):
        bundle = node / f"bundle-{name}"
        bundle.mkdir()
        mounts = [{"source": str(volumes[volume]), "destination": f"/{name}/{volume}"} for volume in has]
        (bundle / "config.json").write_text(json.dumps({"mounts": mounts}))
        container = CONTAINER if name == "job" else replace(CONTAINER, id=name[0] * 64, name=name)
        directory = containers.keep(replace(kept, container=container, bundle=bundle))
        if name == "ended":
            (directory / containers.ENDED_NAME).touch()
    shutil.rmtree(node / "bundle-gone")
    now = containers.read(ID)
    assert now is not None
    assert dumping.sharers(now) == {"/job/cache": ["beside"]}


@pytest.mark.parametrize(
    ("words", "notes", "is_suspended"),
    [
        (("kill", ID, "KILL"), {}, True),
        (("kill", ID, "TERM"), {}, True),
        (("kill", ID, "HUP"), {}, False),
        (("delete", "--force", ID), {}, True),
        (("delete", ID), {}, False),
    ],
)
def test_what_ends_a_restored_container_takes_its_gpus_first(
    node: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], notes: dict[str, str], *, is_suspended: bool
) -> None:
    """Where the driver is on the list; a container that was not restored is the runtime's at once."""
    suspended: list[Process | None] = []

    def suspend(kept: containers.Kept, _settings: Settings) -> str:
        suspended.append(kept.init)
        return "no room"

    monkeypatch.setattr(suspending, "suspend_gpus", suspend)
    (node / "bundle/config.json").write_text(json.dumps({"annotations": notes}))
    kept = containers.read(ID)
    assert kept is not None
    log, made = node / "log", call(node, f"--log={node / 'log'}", *words)

    def act(kept: containers.Kept) -> None:
        containers.keep(kept)
        with contextlib.suppress(PassedOn):
            stop.delete(made, never) if words[0] == "delete" else stop.kill(made, never)

    act(kept)
    assert suspended == []
    restored = replace(kept, init=Process(os.getpid(), 1))
    act(restored)
    assert suspended == ([restored.init] if is_suspended else [])
    if is_suspended and words[0] == "kill":  # the runtime writes the same log
        assert "is stopped with its GPU, which the node may not survive: no room" in log.read_text()


@pytest.mark.parametrize(
    ("version", "listed", "expected"),
    [
        ("595.71.05", "595", True),
        ("595.71.05", "580.1,595.71", True),
        ("595.71.05", "595.7", False),
        ("580.159.04", "595", False),
        ("580.159.04", "", False),
    ],
)
def test_drivers_on_a_list(version: str, listed: str, *, expected: bool) -> None:
    assert suspending.is_on_list(version, listed) is expected
