"""A NetPodman with the runtime handler: what is stopped is checkpointed, what is made again continues."""

from pathlib import Path

from integration.net.engine import NetPodman

_TEMPLATE = Path("/opt/ocihook/ocihook/hook/handler")


class HandledNetPodman(NetPodman):
    """One podman, whose containers are the handler's if an annotation says so."""

    def options(self) -> list[str]:
        """Keep containers by overlayfs: what one has changed is known then."""
        return ["overlay" if option == "vfs" else option for option in super().options()]

    def install(self) -> None:
        """Install ocihook, and put the handler before the runtime."""
        super().install()
        values = {
            "@ORIGIN@": "Test",
            "@RUNTIME@": self.runtime,
            "@PYTHONS@": "/usr/bin/python3",
            "@SITE@": "/opt/ocihook",
        }
        text = self.namespace.path(str(_TEMPLATE)).read_text()
        for name, value in values.items():
            text = text.replace(name, value)
        handler = self.scratch / f"ocihook-{Path(self.runtime).name}"
        handler.write_text(text)
        handler.chmod(0o755)
        self.runtime = str(handler)

    def agent_log(self) -> str:
        """Return what agent and handler have said."""
        logs = [self.namespace.path(f"/run/ocihook/{name}.log") for name in ("agent", "handler")]
        return "\n".join(log.read_text() for log in logs if log.exists())
