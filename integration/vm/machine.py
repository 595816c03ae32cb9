"""A virtual machine with Debian's kernel, whose root is this machine's: what this kernel cannot do is tested there.

Emulated, and not by KVM: in a guest /dev/kvm may be there and start nothing. Its kernel is as its package has it, since
it has all that a root of virtiofs needs. `integration/node-setup vm DIR FORKY` gets it.
"""

import contextlib
import json
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from integration.namespace import CommandError, wait_for

OCIHOOK = f"{sys.executable} -m ocihook"
HISTORY = "/var/lib/ocihook/history"
WAIT_S = 300.0  # for what an emulated machine does beside other tests
_DUMPS = f"""grep -L '"act": *"store"' $(ls -t {HISTORY}/*-*.json)"""  # and restores, the last one first
_RUN = "/run/ocihook"
_VIRTIOFSD = "/usr/libexec/virtiofsd"
_AGENT_LOG = "/run/ocihook-agent.log"
_INIT = Path(__file__).parent / "init"
_SITE = Path(__file__).parents[2]
_MEMORY = "1536M"
_BOOT_S = 300.0


class Machine:
    """A running machine. Its files are in memory: nothing that it does changes this machine."""

    def __init__(self, kernel_root: Path, directory: Path) -> None:
        """Boot it.

        Args:
            kernel_root: where the kernel's package was unpacked.
            directory: for its share, sockets and logs; its path is short.
        """
        self._directory = directory
        self._share = directory / "share"
        self._share.mkdir()
        self._number = 0
        self._running: list[subprocess.Popen[bytes]] = []
        (kernel,) = (kernel_root / "boot").glob("vmlinuz-*")
        shares = {"root": (Path("/"), "--readonly", "--no-announce-submounts"), "share": (self._share,)}
        words: list[str | Path] = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "max"]
        words += ["-m", _MEMORY, "-smp", "2", "-display", "none", "-nodefaults", "-no-reboot", "-kernel", kernel]
        words += ["-object", f"memory-backend-memfd,id=mem,size={_MEMORY},share=on", "-numa", "node,memdev=mem"]
        for name, (path, *options) in shares.items():
            at = directory / f"{name}.sock"
            self._start(_VIRTIOFSD, "--socket-path", at, "--shared-dir", path, "--sandbox", "none", *options)
            wait_for(f"virtiofsd of {name}", at.exists)
            words += [
                "-chardev",
                f"socket,id={name},path={at}",
                "-device",
                f"vhost-user-fs-pci,chardev={name},tag={name}",
            ]
        line = directory / "line.sock"
        words += ["-serial", f"file:{directory / 'console'}", "-serial", f"unix:{line},server=on,wait=off"]
        kernel_options = ["console=ttyS0", "panic=-1", "root=root", "rootfstype=virtiofs", "ro", f"init={_INIT}"]
        words += ["-append", " ".join([*kernel_options, f"ocihook.modules={kernel_root}"])]
        self._start(*words)
        wait_for("qemu", line.exists)
        self._line = socket.socket(socket.AF_UNIX)
        self._line.settimeout(_BOOT_S)
        self._line.connect(str(line))
        self._answers: IO[str] = self._line.makefile("r")
        self._answer("ready")

    def _start(self, *words: str | Path) -> None:
        with (self._directory / "programs.log").open("ab") as log:
            command: list[str | Path] = ["setpriv", "--pdeathsig", "KILL", *words]
            self._running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def _answer(self, what: str) -> str:
        try:
            line = self._answers.readline().strip()
        except TimeoutError:
            line = ""
        if not line:
            logs = [self._directory / "console", self._directory / "programs.log"]
            text = "\n".join(log.read_text(errors="replace")[-4000:] for log in logs if log.exists())
            raise CommandError(f"the machine has not answered ({what})\n{text}")
        return line

    def run(self, script: str, *, check: bool = True) -> str:
        """Run a script of the shell in it; return what it printed.

        Raises:
            CommandError: if it fails and `check` is set, or does not end.
        """
        self._number += 1
        site = shlex.quote(str(_SITE))
        (self._share / f"{self._number}.sh").write_text(f"set -e\nexport PYTHONPATH={site}\n{script}\n")
        self._line.sendall(f"{self._number}\n".encode())
        status = self._answer(script)
        output = (self._share / f"{self._number}.out").read_text(errors="replace")
        if check and status != "0":
            raise CommandError(f"{script}: exit status {status}\n{output}")
        return output

    def start_agent(self, program: str = "-m ocihook agent") -> None:
        """Have an agent run: ocihook's, or one of integration/ with its arguments; any other one ends."""
        if f"{program} " in self.run(f"tr '\\0' ' ' </proc/$(cat {_RUN}/agent.lock)/cmdline", check=False):
            return
        self.run(f"kill $(cat {_RUN}/agent.lock); flock --timeout 60 {_RUN}/agent.lock true", check=False)
        script = f"rm -f {_RUN}/agent.sock; ({sys.executable} {program} >{_AGENT_LOG} 2>&1 &)"
        self.run(f"{script}; until [ -S {_RUN}/agent.sock ]; do sleep 0.2; done")

    def agent_log(self) -> str:
        """Return what the agent has said."""
        return self.run(f"cat {_AGENT_LOG}", check=False)

    def counts(self, name: str) -> list[tuple[int, str]]:
        """Return what a workload has printed into /tmp/NAME, counts and checksums."""
        text = self.run(f"cat /tmp/{name} 2>/dev/null || true")
        return [(int(count), word) for count, word in re.findall(r"^count (\d+) checksum (\w+)", text, re.MULTILINE)]

    def wait_to_count(self, name: str) -> list[tuple[int, str]]:
        """Wait until a workload counts on; return all of it."""
        there = len(self.counts(name))
        try:
            wait_for(f"{name} to count", lambda: len(self.counts(name)) > there + 1, WAIT_S)
        except AssertionError as error:
            said = self.run(f"tail -n 30 /tmp/{name}; ps -eo pid,stat,wchan:30,args", check=False)
            raise AssertionError(f"{error}\n{said}\n{self.agent_log()}") from error
        return self.counts(name)

    def last_session(self) -> dict[str, Any]:
        """Wait until no session is open; return the record of the dump or restore that ended last."""
        wait_for(
            "the session to be over",
            lambda: "No session is open." in self.run(f"{OCIHOOK} recover", check=False),
            WAIT_S,
        )
        record: dict[str, Any] = json.loads(self.run(f"cat $({_DUMPS} | head -n 1)"))
        return record

    def put(self, name: str, content: bytes) -> str:
        """Put a file into its share; return its path in it."""
        path = self._share / name
        path.write_bytes(content)
        path.chmod(0o755)
        return f"/run/share/{name}"

    def close(self) -> None:
        """Switch it off."""
        for process in reversed(self._running):
            process.kill()
            process.wait(60)
        with contextlib.suppress(AttributeError):
            self._line.close()
