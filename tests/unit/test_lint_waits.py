"""The check that no session waits without its patience: it finds every kind of wait, wherever a session comes."""

from pathlib import Path

import pytest

from tests.lint.waits import PATIENCE, find, main, modules

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "call",
    [
        "time.sleep(1)",
        "sleep(1)",
        "select.select([fd], [], [])",
        "select.select([fd], [], [], 5)",
        "poll.poll()",
        "poll.poll(1000)",
        "os.waitpid(pid, 0)",
        "os.waitpid(-1, _WALL)",
        "os.waitid(os.P_PID, pid, os.WEXITED)",
        "os.wait()",
        "signal.sigwait({1})",
        "signal.sigwaitinfo({1})",
        "signal.sigtimedwait({1}, 5)",
        "fcntl.flock(fd, fcntl.LOCK_EX)",
        "fcntl.flock(fd, how)",
        "fcntl.flock(fd, fcntl.LOCK_EX if x else fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.lockf(fd, fcntl.LOCK_SH)",
        "subprocess.run(command, check=True)",
        "subprocess.check_output(command)",
        "process.wait()",
        "process.communicate(data)",
        "thread.join()",
        "connection.recv(1)",
        "socket.recv_fds(control, 1, 1)",
        "listener.accept()",
        "os.read(fd, 1)",
    ],
)
def test_a_wait_is_found_and_may_be_excused(call: str) -> None:
    (found,) = find(f"x = 1\ny = {call}\n")
    assert found.line == 2
    assert list(find(f"y = {call}  # waits: for nobody\n")) == []
    assert list(find(f"# waits: for nobody\ny = {call}\n")) == []
    assert [wait.line for wait in find(f"y = {call}  # waits:\n")] == [1]  # without a reason
    assert [wait.line for wait in find(f"x = 1  # waits: another\ny = {call}\n")] == [2, 1]


@pytest.mark.parametrize(
    "call",
    [
        "patience.sleep(1)",
        "select.select([fd], [], [], 0)",
        "select.poll()",
        "poll.poll(0)",
        "os.waitpid(pid, os.WNOHANG | _WALL)",
        "fcntl.flock(fd, how | fcntl.LOCK_NB)",
        "fcntl.flock(fd, fcntl.LOCK_UN)",
        "subprocess.run(command, timeout=5)",
        "subprocess.Popen(command)",
        "process.wait(timeout=5)",
        "', '.join(names)",
        "os.pread(fd, 1, 0)",
    ],
)
def test_what_does_not_wait_or_ends_by_itself(call: str) -> None:
    assert list(find(f"x = {call}\n")) == []
    assert [wait.what for wait in find(f"x = {call}  # waits: for nobody\n")] == ["nothing waits here"]


def test_every_module_that_a_session_runs_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    looked_at = modules(ROOT)
    assert PATIENCE in looked_at
    for part in (
        "stages.dump",
        "linux.ptrace",
        "gpu.processes",
        "store.domain",
        "gpu.driver",
        "criu.version",
        "container.runtime_call",
    ):
        assert f"ocihook.{part}" in looked_at
    assert "ocihook.agent.server" not in looked_at
    assert main() == 0, capsys.readouterr().out
