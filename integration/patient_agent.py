"""An agent of a test stays until it is ended: on a slow machine the dump that it is for may be long in coming."""

from ocihook.agent import server

_STAYS_S = 3600.0

_run = server.Agent.run


def _stay(self: server.Agent, idle_timeout_s: float) -> None:
    _run(self, max(idle_timeout_s, _STAYS_S))


def main() -> None:
    """Be an agent."""
    server.Agent.run = _stay  # type: ignore[method-assign]
    server.main()
