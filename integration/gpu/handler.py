"""Stops GPU containers of the runtime handler, which checkpoints them, and creates them again: they continue.

    handler.py RESULTS_DIR CASE...     as run.py, which prepares the node for it

A case is PROGRAM:SIZE with options, as run.py's. What an engine would do is done here by its calls to the runtime:
`create`, `start`, `kill TERM`, `state`, `delete`; each time under a new name, with an overlay as its rootfs. Written to
handler.json.
"""

import json
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from integration.gpu.run import (
    IMAGES,
    WORK,
    Container,
    command,
    last_session,
    node_facts,
    phases,
    prepare,
    set_up,
)

HANDLER = WORK / "libexec" / "ocihook-runc"
_TIMES = 3
_LIMIT_S = 200.0


class Handled:
    """A container as an engine makes it, whose runtime is the handler."""

    def __init__(self, name: str, program: str, size: str, options: list[str]) -> None:
        notes = {"checkpoint-on-stop": "true", "restore-from": "latest", "member": f"{program}-{size}"}
        self.container: Container = prepare(name, program, size, options, 1, notes)
        self.name, self._rootfs = name, self.container.bundle / "rootfs"
        layers = IMAGES / "layers" / name  # changes cannot be kept on an overlay
        for layer in ("lower", "upper", "work"):
            (layers / layer).mkdir(parents=True)
        directories = ",".join(f"{layer}dir={layers / layer}" for layer in ("lower", "upper", "work"))
        done = command("mount", "-t", "overlay", "overlay", "-o", directories, self._rootfs)
        assert done.returncode == 0, "no overlay here"

    def call(self, *words: str, **options: Any) -> str:  # noqa: ANN401 - subprocess.run's
        """Call the handler as an engine does."""
        done = command(HANDLER, *words, cwd=self.container.bundle, **(options or {"capture_output": True}))
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stderr} {self.container.output[-10:]}")
        return done.stdout or ""

    def state(self) -> str:
        """Return the state that the engine sees: created, running, stopped."""
        return str(json.loads(self.call("state", self.name))["status"])

    def make(self) -> dict[str, float]:
        """Create and start it; return the seconds that both took."""
        began = time.time()
        self.call("create", self.name, **self.container.stdio())
        created = time.time()
        state, lines = self.state(), len(self.container.lines)
        assert state == "created", state
        self.call("start", self.name)
        started = time.time()
        self.container.wait_for(1)
        return {
            "create_s": created - began,
            "start_s": started - created,
            "first_line_s": self.container.lines[lines][0] - began,
        }

    def stop(self) -> float:
        """Stop it as an engine does; return the seconds until it is gone."""
        began = time.time()
        self.call("kill", self.name, "TERM")
        while self.state() != "stopped":
            if time.time() > began + _LIMIT_S:
                raise TimeoutError(f"{self.name} does not stop")
            time.sleep(0.02)
        return time.time() - began

    def remove(self) -> None:
        """Delete it and its rootfs."""
        command(HANDLER, "delete", "--force", self.name, capture_output=True)
        command("umount", "--lazy", self._rootfs, capture_output=True)
        shutil.rmtree(IMAGES / "layers" / self.name, ignore_errors=True)


def run_case(case: str, number: int) -> dict[str, Any]:
    """Run one case; return its row."""
    program, size, *options = case.split(":")
    row: dict[str, Any] = {"case": case, "stops": []}
    seen: list[list[tuple[int, str]]] = []
    for again in range(_TIMES + 1):
        handled = Handled(
            f"handled{number}-{again}",
            program,
            size,
            [option for option in options if not (again and option.startswith("warm="))],
        )
        try:
            made = handled.make()
            if again:
                row["stops"][-1] |= made | {"restore_phases": phases(last_session("post-resume", handled.name))}
                print(json.dumps(row["stops"][-1]), flush=True)
            handled.container.wait_for(5)
            if again < _TIMES:
                stop_s = handled.stop()
                stop: dict[str, Any] = {"stop_s": stop_s}
                stop["dump_phases"] = phases(last_session("pre-dump", handled.name))
                row["stops"].append(stop)
        except BaseException:
            print(handled.container.output[-10:], flush=True)
            raise
        finally:
            handled.remove()
        seen.append([(count, checksum) for _, count, checksum in handled.container.lines])
    row["first_counts"] = [lines[0][0] for lines in seen]
    goes_on = all(after[0][0] == before[-1][0] + 1 for before, after in pairwise(seen))
    row["verified"] = goes_on and len({checksum for lines in seen for _, checksum in lines}) == 1
    return row


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    results = Path(sys.argv[1])
    results.mkdir(exist_ok=True)
    set_up("--runtime")
    rows = []
    for number, case in enumerate(sys.argv[2:]):
        try:
            row = run_case(case, number)
        except (OSError, RuntimeError, TimeoutError, AssertionError, subprocess.TimeoutExpired) as error:
            row = {"case": case, "verified": False, "error": str(error)}
            for name in ("handler", "agent"):
                log = Path(f"/run/ocihook/{name}.log")
                print(log.read_text()[-3000:] if log.exists() else "", flush=True)
        print(case, "verified" if row["verified"] else f"FAILED {row.get('error', '')}", flush=True)
        rows.append({**node_facts(), **row})
        (results / "handler.json").write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(0 if all(row["verified"] for row in rows) else 1)


if __name__ == "__main__":
    main()
