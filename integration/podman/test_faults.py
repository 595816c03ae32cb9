"""Faults on real nodes: afterwards the container continues, or its checkpoint is complete, and that is reported."""

import itertools
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.journals import last_session, sessions
from integration.namespace import wait_for
from integration.podman.conftest import MakePodman
from integration.podman.engine import NOTES, Podman, assert_packed, image_names
from integration.steps import read_steps, representative
from tests.damage import flip_bit

DYING_AGENT = Path(__file__).parents[1] / "dying_agent.py"
WAITING_AGENT = Path(__file__).parents[1] / "waiting_agent.py"
_TRIES = 5


def damage(archive: Path, member_pattern: str, *, offset: int) -> None:
    """Flip one bit of a member in place: of the largest, as a worker that came late has next to nothing in its pack."""
    with tarfile.open(archive) as tar:
        member = max((m for m in tar if re.fullmatch(member_pattern, m.name)), key=lambda member: member.size)
    flip_bit(archive, member.offset_data + offset % member.size)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (r"checkpoint/ocihook-\d+\.pack", "is damaged"),
        (r"checkpoint/ocihook\.manifest", "manifest is damaged"),
        (r"checkpoint/core-1\.img", "core-1.img is not what was checkpointed"),
    ],
)
def test_damaged_checkpoint_is_refused_before_anything_starts(podman: Podman, member: str, message: str) -> None:
    archive = podman.scratch / "c.tar"
    podman.start("c")
    podman.checkpoint("c", archive)
    podman.remove("c")
    damage(archive, member, offset=1000)
    podman.restore(archive, check=False)
    assert not podman.is_running("c")
    restore = last_session(podman.namespace, "pre-restore")
    verdict = restore["stages"]["pre-restore"]
    assert verdict["status"] == 1
    assert message in verdict["message"]
    assert "The restore is refused, nothing was started" in verdict["message"]
    assert restore["effects"] == []
    # No process was made: CRIU went no further than that stage.
    assert "post-resume" not in restore["stages"]


def test_missing_pack_is_refused(podman: Podman) -> None:
    archive, partial = podman.scratch / "c.tar", podman.scratch / "partial.tar"
    podman.start("c")
    podman.checkpoint("c", archive)
    podman.remove("c")
    with tarfile.open(archive) as source, tarfile.open(partial, "w") as target:
        for member in source:
            if not member.name.endswith(".pack"):
                target.addfile(member, source.extractfile(member))
    podman.restore(partial, check=False)
    assert not podman.is_running("c")
    message = last_session(podman.namespace, "pre-restore")["stages"]["pre-restore"]["message"]
    assert re.search(r"pack ocihook-\d+\.pack cannot be opened: No such file or directory", message)


@pytest.mark.parametrize("on_pack_error", ["keep", "fail"])
def test_full_disk_while_packing(make_podman: MakePodman, on_pack_error: str) -> None:
    # Room for CRIU's images, and for half of the packs.
    podman = make_podman("runc", size="84m")
    podman.configure(f'[agent]\nidle_timeout_s = 2\n[policy]\non_pack_error = "{on_pack_error}"\n')
    podman.install()
    podman.start("c", 64)
    archive = podman.scratch / "c.tar"
    output = podman.checkpoint("c", archive, check=on_pack_error == "keep")
    dump = last_session(podman.namespace, "post-dump")
    message = dump["stages"]["post-dump"]["message"]
    assert "no space left" in message
    assert dump["effects"] == []
    if on_pack_error == "fail":
        assert "rror" in output
        assert "The dump fails, the container runs on" in message
        podman.assert_counts("c")
        return
    assert "The checkpoint is complete but not packed" in message
    names = image_names(archive)
    assert any(name.startswith("pages-") for name in names)
    assert {name for name in names if name.startswith("ocihook")} == NOTES
    before = podman.count("c")
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)


def test_wrong_configuration_refuses_the_dump_and_names_the_key(podman: Podman) -> None:
    podman.configure('[policy]\nmoed = "inline"\n')
    podman.start("c")
    output = podman.checkpoint("c", podman.scratch / "c.tar", check=False)
    assert "rror" in output
    podman.assert_counts("c")
    message = last_session(podman.namespace, "pre-dump")["stages"]["pre-dump"]["message"]
    assert "/etc/ocihook/config.toml: [policy]: unknown key 'moed'. Did you mean 'mode'?" in message
    assert "the container runs on" in message


def test_wrong_annotation_refuses_the_dump(podman: Podman) -> None:
    podman.start("c", mode="inlien")
    podman.checkpoint("c", podman.scratch / "c.tar", check=False)
    podman.assert_counts("c")
    message = last_session(podman.namespace, "pre-dump")["stages"]["pre-dump"]["message"]
    assert "annotation ocihook.io/mode: mode must be one of 'inline', 'store', 'off', not 'inlien'" in message


@pytest.mark.parametrize("loss", [["rm", "/run/ocihook/agent.sock"], ["mount", "-t", "tmpfs", "tmpfs", "/run/ocihook"]])
def test_an_agent_that_cannot_be_found_fails_no_dump(podman: Podman, loss: list[str]) -> None:
    podman.configure("[agent]\nidle_timeout_s = 30\n")
    podman.start("c")
    podman.checkpoint("c", podman.scratch / "first.tar", "--leave-running")
    podman.namespace.run(*loss)
    archive = podman.scratch / "c.tar"
    before = podman.count("c")
    podman.checkpoint("c", archive)
    assert_packed(archive)
    podman.remove("c")
    podman.restore(archive)
    podman.assert_goes_on("c", before)


def test_silent_application_refuses_the_dump(podman: Podman) -> None:
    podman.start("c", quiesce_signal="USR1", quiesce_ack="/tmp/never", quiesce_timeout_s="0.5", resume_signal="USR2")
    podman.checkpoint("c", podman.scratch / "c.tar", check=False)
    podman.assert_counts("c")
    message = last_session(podman.namespace, "pre-dump")["stages"]["pre-dump"]["message"]
    assert "did not create or touch /tmp/never within 0.5 s of SIGUSR1" in message
    wait_for("the application to be told to go on", lambda: "resumed" in podman("logs", "c"))


def test_mode_off_leaves_the_images_alone(podman: Podman) -> None:
    archive = podman.scratch / "c.tar"
    podman.start("c", mode="off")
    podman.checkpoint("c", archive)
    assert not any(name.startswith("ocihook") for name in image_names(archive))


def test_agent_killed_at_any_step(podman: Podman) -> None:
    """The hook starts another agent, which finishes: every dump is packed, every restore continues."""
    podman.start("c", quiesce_signal="USR1", resume_signal="USR2")

    def round_trip(last_of_dump: int, last_of_restore: int) -> tuple[list[str], list[str]]:
        archive = podman.scratch / "c.tar"
        start_dying_agent(podman, last_of_dump)
        podman.checkpoint("c", archive)
        dump = end_dying_agent(podman)
        before = podman.count("c")
        assert_packed(archive)
        assert "every checksum right" in podman.ocihook("archive", "verify", str(archive))
        podman.remove("c")
        start_dying_agent(podman, last_of_restore)
        podman.restore(archive)
        restore = end_dying_agent(podman)
        podman.assert_goes_on("c", before)
        wait_for("the application to be told to go on", lambda: "resumed" in podman("logs", "c"))
        archive.unlink()
        return dump, restore

    kill_at_any_step(round_trip)


def kill_at_any_step(round_trip: Callable[[int, int], tuple[list[str], list[str]]], *, rounds: int = 12) -> None:
    """Call what dumps and restores with the last steps of the agents; first with 0, to see what there are."""
    dump, restore = round_trip(0, 0)
    most = len(dump) + len(restore) if os.environ.get("OCIHOOK_NIGHTLY") else rounds
    deaths = [representative(steps, most) if steps else [] for steps in (dump, restore)]
    died = 0
    for lasts in itertools.zip_longest(*deaths, fillvalue=0):
        found = round_trip(*lasts)
        died += sum(0 < last <= len(steps) for last, steps in zip(lasts, found, strict=True))
    assert died > rounds / 2, "so few deaths were not seen before; does the agent do anything?"


def test_a_hook_that_waits_no_longer_fails_the_dump_and_the_agent_takes_all_back(podman: Podman) -> None:
    archive = podman.scratch / "c.tar"
    podman.start("c")
    (script,) = re.findall(
        r"^action-script (\S+)$", podman.namespace.path("/etc/criu/runc.conf").read_text(), re.MULTILINE
    )
    launcher = podman.namespace.path(script.strip('"'))
    patient = launcher.read_text()
    called = "from ocihook.hook.client import main; sys.exit(main())"
    assert called in patient
    impatient = "import ocihook.hook.client as c; c.VERDICT_S = 0.5; sys.exit(c.main())"
    launcher.write_text(patient.replace(called, impatient))
    start_agent(podman, WAITING_AGENT)
    podman.checkpoint("c", archive, check=False)
    wait_for("the session to end", lambda: "No session is open." in podman.ocihook("recover", check=False))
    podman.assert_counts("c")
    session = last_session(podman.namespace, "post-dump")
    assert session["effects"] == []
    assert "was killed meanwhile" in session["stages"]["post-dump"]["message"]
    end_agent(podman)

    launcher.write_text(patient)
    podman.checkpoint("c", archive)
    assert_packed(archive)
    assert "every checksum right" in podman.ocihook("archive", "verify", str(archive))


def start_dying_agent(podman: Podman, last: int) -> None:
    """Start an agent that dies before its `last`-th step; 0: it only counts them."""
    (podman.namespace.path("/run/ocihook") / "steps").unlink(missing_ok=True)
    start_agent(podman, DYING_AGENT, str(last))


def start_agent(podman: Podman, program: Path, *arguments: str) -> None:
    """Start a special agent in place of any other: a hook's last process may have started one late."""
    for _ in range(_TRIES):
        if _is_agent(podman, program, arguments):
            return
        end_agent(podman)
    raise AssertionError("another agent runs each time")


def _is_agent(podman: Podman, program: Path, arguments: tuple[str, ...]) -> bool:
    """Start one and return whether it listens; it leaves at once where another one runs."""
    agent = podman.spawn_agent(program, *arguments)
    lock, name = (podman.namespace.path("/run/ocihook") / file for file in ("agent.lock", "agent.sock"))

    def listens() -> bool:
        return name.exists() and lock.read_text().strip() == str(agent.pid)

    wait_for("the agent to listen, or to leave", lambda: agent.poll() is not None or listens())
    return agent.poll() is None


def end_dying_agent(podman: Podman) -> list[str]:
    """Let all be finished, end whatever agent is there, and return the steps of the dying one."""
    # An agent killed when CRIU has ended leaves a journal and no hook that would start another one.
    wait_for("all sessions to end", lambda: "No session is open." in podman.ocihook("recover", check=False))
    assert all(session["effects"] == [] for session in sessions(podman.namespace))
    assert "/run/ocihook/sessions" not in podman.namespace.run("cat", "/proc/self/mountinfo")
    steps = read_steps(podman.namespace.path("/run/ocihook/steps"))
    end_agent(podman)
    return steps


def end_agent(podman: Podman) -> None:
    """End whatever agent is there; none may have work to do."""
    if podman.namespace.path("/run/ocihook/agent.lock").exists():
        podman.namespace.run("sh", "-c", "kill $(cat /run/ocihook/agent.lock) 2>/dev/null", check=False)
        podman.namespace.run("flock", "--timeout", "60", "/run/ocihook/agent.lock", "true")
    podman.namespace.path("/run/ocihook/agent.sock").unlink(missing_ok=True)
