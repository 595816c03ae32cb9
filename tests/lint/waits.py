"""Finds what a session waits for without its patience (ocihook/linux/patience.py): `python -m tests.lint.waits`.

Looked at is every module that a session's process may run. What waits there and has a reason to do so by itself says in
a comment who bounds it: `# waits: <reason>`, on its line or the one before.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FIRST = "ocihook.agent.session"
PATIENCE = "ocihook.linux.patience"
_EXCUSE = re.compile(r"#\s*waits:\s*\S")
_ALWAYS = {
    "time.sleep",
    "sleep",
    "os.read",
    "os.wait",
    "os.wait3",
    "os.wait4",
    "signal.pause",
    "signal.sigwait",
    "signal.sigwaitinfo",
    "signal.sigtimedwait",
}
_RECEIVES = {"recv", "recv_into", "recvfrom", "recvfrom_into", "recvmsg", "recvmsg_into", "recv_fds", "accept"}
_RUNS = {"run", "call", "check_call", "check_output", "communicate", "wait"}


class Wait(NamedTuple):
    """A call that may not return for a while."""

    line: int
    what: str


def modules(root: Path, first: str = FIRST) -> dict[str, Path]:
    """Return all modules of a package that `first` leads to, late imports too, with their files below `root`."""
    found: dict[str, Path] = {}
    left = [first]
    while left:
        name = left.pop()
        places = (root / f"{name.replace('.', '/')}{end}" for end in (".py", "/__init__.py"))
        path = next(filter(Path.exists, places), None)
        if name in found or path is None:
            continue
        found[name] = path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                left += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                left += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return {name: path for name, path in found.items() if name.partition(".")[0] == first.partition(".")[0]}


def find(source: str) -> Iterator[Wait]:
    """Yield what waits without an excuse; and every excuse of nothing."""
    lines = source.splitlines()
    excuses = {number for number, line in enumerate(lines, 1) if _EXCUSE.search(line)}
    used = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not _waits(node):
            continue
        above = node.lineno - 1
        is_own_line = above in excuses and lines[above - 1].lstrip().startswith("#")
        around = {*range(node.lineno, (node.end_lineno or node.lineno) + 1), *([above] if is_own_line else [])}
        if not around & excuses:
            yield Wait(node.lineno, ast.unparse(node.func))
        used |= around & excuses
    yield from (Wait(number, "nothing waits here") for number in excuses - used)


def _waits(call: ast.Call) -> bool:  # noqa: PLR0911 - one for each kind
    name = ast.unparse(call.func)
    last = name.rpartition(".")[2]
    arguments = [ast.unparse(argument) for argument in call.args]
    all_arguments = " ".join([*arguments, *(ast.unparse(keyword.value) for keyword in call.keywords)])
    has_timeout = any(keyword.arg == "timeout" for keyword in call.keywords)
    if name in _ALWAYS or (last in _RECEIVES and isinstance(call.func, ast.Attribute)):
        return True
    if last in ("waitpid", "waitid"):
        return "WNOHANG" not in all_arguments
    if last in ("flock", "lockf"):
        ways = [way for argument in call.args[1:] for way in _either(argument)]
        return not all(re.search(r"LOCK_(NB|UN)", ast.unparse(way)) for way in ways)
    if name == "select.select":
        return arguments[3:] != ["0"]
    if last == "poll" and name != "select.poll":
        return arguments != ["0"]
    if last == "join":
        return not arguments and not has_timeout  # of a thread or process, and not of strings
    if name.startswith("subprocess.") or last in ("communicate", "wait"):
        return last in _RUNS and not has_timeout and not (last == "wait" and arguments)
    return False


def _either(argument: ast.expr) -> list[ast.expr]:
    return [argument.body, argument.orelse] if isinstance(argument, ast.IfExp) else [argument]


def main() -> int:
    """Print what was found, as compilers do."""
    root = Path(__file__).parents[2]
    wrong = [
        f"{path.relative_to(root)}:{wait.line}: {wait.what}: a session waits without its patience"
        for name, path in sorted(modules(root).items())
        if name != PATIENCE
        for wait in find(path.read_text())
    ]
    print("\n".join(wrong) or "every wait of a session asks its patience")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
