"""A podman with CRIU >= 4.2 whose containers are on "nodes": network namespaces on a bridge, which tests make."""

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from integration.namespace import Namespace, wait_for
from integration.packages.engine import PIVOTED
from integration.podman.engine import IMAGE, SITE, Podman

INTEGRATION = Path(__file__).parents[1]
BRIDGE = "bridge"  # the namespace that the bridge is in: the network between the nodes
_HELD = """table inet node {
    chain in { type filter hook input priority 0; counter drop; }
    chain out { type filter hook output priority 0; drop; }
}"""


class Place(NamedTuple):
    """The addresses of a node."""

    four: str
    six: str

    @classmethod
    def of(cls, net: int, host: int) -> "Place":
        """Return addresses by numbers; the net is another one when a node is recreated."""
        return cls(f"10.77.{net}.{host}", f"fd77::{net:x}:{host:x}")


class NetPodman(Podman):
    """One podman in the forky root, with a network of its own in which no link leads outside."""

    def __init__(
        self,
        scratch: Path,
        root: Path,
        wheels: Path,
        peer: Path,
        runtime: str = "runc",
        *,
        cuda_files: Path | None = None,
    ) -> None:
        self._root = root
        if cuda_files:
            cuda_files = Path(shutil.copytree(cuda_files, scratch / "cuda"))
        super().__init__(scratch, runtime, peer, cuda_files=cuda_files)
        subprocess.run(["cp", "-r", wheels, self.namespace.path("/opt/ocihook")], check=True, timeout=120)
        self.peer = str(scratch / "peer")
        Path(self.peer).write_bytes(peer.read_bytes())
        Path(self.peer).chmod(0o755)
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "netns", "add", BRIDGE)
        self.run("ip", "-n", BRIDGE, "link", "add", "br0", "type", "bridge")
        self.run("ip", "-n", BRIDGE, "link", "set", "br0", "up")

    def _make_namespace(self, size: str) -> Namespace:
        assert not size
        return Namespace(PIVOTED, [str(self.scratch), str(self._root)], own_network=True)

    def configure(self, text: str) -> None:
        """Write ocihook's configuration."""
        path = self.namespace.path("/etc/ocihook/config.toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def configure_policy(self, **policy: str) -> None:
        """Write ocihook's configuration, with a policy."""
        lines = [f'{key} = "{value}"' for key, value in policy.items()]
        self.configure("\n".join(["[agent]", "idle_timeout_s = 2", "[policy]", *lines, ""]))

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command on the node."""
        return self.namespace.run(*command, check=check)

    def ocihook(self, *arguments: str, check: bool = True) -> str:
        """Run an ocihook command on the node."""
        return self.namespace.run("python3", "-m", "ocihook", *arguments, check=check, PYTHONPATH="/opt/ocihook")

    def spawn_agent(self, program: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """Start an agent of integration/, whose files the node does not see, with the node's ocihook."""
        site = self.scratch / "agents"
        (site / "integration").mkdir(parents=True, exist_ok=True)
        for path in INTEGRATION.glob("*.py"):
            shutil.copy(path, site / "integration")
        command = ["python3", str(site / "integration" / program.name), *arguments]
        return self.namespace.spawn(*command, log=self.scratch / "agent.log", PYTHONPATH=f"/opt/ocihook:{site}")

    def install(self) -> None:
        """Install ocihook; cgroups are not CRIU's affair here, as only version 1 has controllers on some machines."""
        self.namespace.path("/etc/criu").mkdir(exist_ok=True)
        self.ocihook("install")

    def act_at(self, stage: str, command: str) -> None:
        """Let CRIU run a shell command at a stage when our hook has given its verdict; one takes the other's place."""
        self.act(**{stage.replace("-", "_"): command})

    def act(self, **commands: str) -> None:
        """As `act_at`, at several stages, which are spelled with `_`."""
        cases = [f"{stage.replace('_', '-')}) {command} ;;" for stage, command in commands.items()]
        script = self.scratch / "action"
        script.write_text("\n".join(["#!/bin/sh", 'case "$CRTOOLS_SCRIPT_ACTION" in', *cases, "esac", ""]))
        script.chmod(0o755)
        for path in self.namespace.path("/etc/criu").glob("*run*.conf"):
            line = f"action-script {script}\n"  # CRIU runs the script that is named last first
            path.write_text(line + path.read_text().replace(line, ""))

    def act_no_more(self) -> None:
        """Take back what `act_at` did."""
        (self.scratch / "action").write_text("#!/bin/sh\n")

    def make_place(
        self, name: str, place: Place, *, is_plugged: bool = True, mac: str = "", is_held: bool = False
    ) -> Place:
        """Make a node with these addresses.

        Args:
            name: of the node, of its network namespace, and with `v-` of the end of its link that is at the bridge.
            place: its addresses.
            is_plugged: whether it can be reached; else from `plug` on.
            mac: address of its link; else one that nothing had before.
            is_held: whether it lets nothing in or out from the beginning, until `lets_in`.
        """
        ip = ["ip", "-n", name]
        commands = [
            ["ip", "netns", "add", name],
            *([["ip", "netns", "exec", name, "nft", f"'{_HELD}'"]] if is_held else []),
            [*ip, "link", "set", "lo", "up"],
            [*ip, "link", "add", "eth0", "type", "veth", "peer", "name", f"v-{name}", "netns", BRIDGE],
            ["ip", "-n", BRIDGE, "link", "set", f"v-{name}", "master", "br0", "up" if is_plugged else "down"],
            *([[*ip, "link", "set", "eth0", "address", mac]] if mac else []),
            [*ip, "addr", "add", f"{place.four}/16", "dev", "eth0"],
            [*ip, "addr", "add", f"{place.six}/64", "dev", "eth0", "nodad"],
            [*ip, "link", "set", "eth0", "up"],
        ]
        self.run("sh", "-ec", "\n".join(" ".join(command) for command in commands))
        return place

    def plug(self, *names: str) -> None:
        """Let nodes be reached."""
        for name in names:
            self.run("ip", "-n", BRIDGE, "link", "set", f"v-{name}", "up")

    def unplug(self, name: str) -> None:
        """Keep a node from being reached."""
        self.run("ip", "-n", BRIDGE, "link", "set", f"v-{name}", "down")

    def kept_out(self, name: str) -> int:
        """Return how many packets a node that is held has not let in."""
        found = re.search(r"counter packets (\d+)", self.inside(name, "nft", "list", "table", "inet", "node"))
        assert found
        return int(found[1])

    def lets_in(self, name: str) -> str:
        """Return the shell command that lets a node's traffic pass."""
        return f"nsenter --net=/run/netns/{name} nft delete table inet node"

    def remove_place(self, name: str) -> None:
        """Remove a node with all its links."""
        self.run("ip", "-n", BRIDGE, "link", "delete", f"v-{name}")  # the kernel is slow to remove what a namespace has
        self.run("ip", "netns", "delete", name)

    def inside(self, name: str, *command: str, check: bool = True) -> str:
        """Run a command in a node's network."""
        return self.run("nsenter", f"--net=/run/netns/{name}", *command, check=check)

    def spawn_peer(self, name: str, *arguments: str) -> Path:
        """Run the peer in a node's network, in no container; return the file with what it prints."""
        log = self.scratch / f"{name}.{len(list(self.scratch.glob('*.said')))}.said"
        self.namespace.spawn("nsenter", f"--net=/run/netns/{name}", self.peer, *arguments, log=log)
        return log

    def start_peer(
        self, name: str, place: str, *arguments: str, options: Sequence[str] = (), says: str = "ready", **notes: str
    ) -> None:
        """Run the peer in a container.

        Args:
            name: of the container.
            place: the node's name; or with a colon what podman's --network takes.
            arguments: of the peer.
            options: of podman.
            says: what to wait for.
            notes: annotations of ocihook, without prefix.
        """
        self(*self.peer_command(name, place, *arguments, options=options, **notes))
        wait_for(f"{name} to be ready", lambda: says in self.said(name))

    @staticmethod
    def peer_command(name: str, place: str, *arguments: str, options: Sequence[str] = (), **notes: str) -> list[str]:
        """Return what podman is called with for that."""
        network = place if ":" in place else f"ns:/run/netns/{place}"
        given = [f"--annotation=ocihook.io/{key.replace('_', '-')}={value}" for key, value in notes.items()]
        command = ["run", "--detach", "--name", name, "--network", network, "--pids-limit", "0", *given, *options]
        return [*command, IMAGE, "/workload", *arguments]

    def said(self, name: str) -> str:
        """Return what a container has printed since it was started or restored."""
        return self("logs", name)

    def use_kinds(self, name: str) -> dict[str, str]:
        """Have a container use its sockets; return what each kind gave."""
        count = self.said(name).count("used\n")
        self("kill", "--signal", "USR1", name)
        wait_for(f"{name} to use its sockets", lambda: self.said(name).count("used\n") > count)
        said = self.said(name).rpartition("used\n")[0].rpartition("used\n")[2]
        return dict(re.findall(r"^kind ([\w-]+): ?(.*)$", said, re.MULTILINE))

    def holds(self, place: str) -> list[str]:
        """Return what holds traffic in a node's network: rules that drop everything, of ocihook, and locks of CRIU."""
        rules = self.inside(place, "nft", "list", "ruleset")
        return re.findall(r"^table .*CRIU.*$|^.*nfproto @held drop$|^\s*chain CRIU.*$", rules, re.MULTILINE)


class HandledNetPodman(NetPodman):
    """The same with the runtime handler before its runtime."""

    def __init__(self, scratch: Path, root: Path, wheels: Path, peer: Path) -> None:
        super().__init__(scratch, root, wheels, peer)
        handler = scratch / "ocihook-runc"
        text = (SITE / "ocihook/hook/handler").read_text().replace("@PYTHONS@", "/usr/bin/python3")
        handler.write_text(text.replace("@RUNTIME@", self.runtime).replace("@SITE@", "/opt/ocihook"))
        handler.chmod(0o755)
        self.runtime = str(handler)
        self.install()

    def options(self) -> list[str]:
        """Keep containers by overlayfs: what one has changed is known then."""
        return ["overlay" if option == "vfs" else option for option in super().options()]
