"""The command line: help for everything, JSON for programs, one line and an exit status for every error."""

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ocihook import __version__
from ocihook.cli.main import cli
from tests.fakes.images import make_archive, make_image_set, mixed_pages


def commands(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    found = [(path, command)]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            sub = command.get_command(context, name)
            assert sub is not None
            found += commands(sub, (*path, name))
    return found


ALL = commands(cli)


@pytest.mark.parametrize("path", [path for path, _ in ALL], ids=" ".join)
def test_every_command_and_option_has_help(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, [*path, "--help"])
    assert result.exit_code == 0
    command = dict(ALL)[path]
    assert command.help
    assert all(option.help or option.hidden for option in command.params if isinstance(option, click.Option))


NUMBERS = [
    (path, option)
    for path, command in ALL
    for option in command.params
    if option.type in (click.INT, click.FLOAT) or isinstance(option.type, click.IntRange | click.FloatRange)
]


@pytest.mark.parametrize(("path", "option"), NUMBERS, ids=str)
def test_every_number_has_a_range(path: tuple[str, ...], option: click.Parameter) -> None:
    for wrong in ("-1", "nan", "inf", "9" * 30):
        result = CliRunner().invoke(cli, [*path, option.opts[0], wrong])
        assert (result.exit_code, f"'{option.opts[0]}'" in result.stderr) == (2, True), wrong


def test_there_are_numbers() -> None:
    names = {option.opts[0] for _, option in NUMBERS}
    assert names == {"--pid", "--workers", "--keep-last", "--timeout", "--tries", "--wait", "--size"}


def test_commands_of_the_design_are_there() -> None:
    names = {" ".join(path) for path, _ in ALL}
    wanted = ["install", "uninstall", "doctor", "ps", "recover", "agent", "demo"]
    wanted += ["wait", *(f"store {verb}" for verb in ("status", "list", "verify", "prune", "repair"))]
    wanted += [f"archive {verb}" for verb in ("list", "inspect", "verify", "pack", "unpack", "diff")]
    assert names >= set(wanted)


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ocihook", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=cwd)


def test_version() -> None:
    assert run("--version").stdout == f"ocihook, version {__version__}\n"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    make_image_set(tmp_path / "images", {1: mixed_pages(100), 5: mixed_pages(20, seed=2)})
    make_archive(tmp_path / "a.tar", tmp_path / "images")
    return tmp_path / "a.tar"


def test_archive_commands_for_people_and_programs(archive: Path, tmp_path: Path) -> None:
    packed, plain = str(tmp_path / "packed.tar"), str(tmp_path / "plain.tar")
    assert run("archive", "pack", str(archive), packed).returncode == 0
    assert run("archive", "unpack", packed, plain).returncode == 0
    for command in (["list", str(archive), packed], ["inspect", packed], ["verify", packed], ["diff", packed, plain]):
        people = run("archive", *command)
        assert (people.returncode, people.stderr) == (0, "")
        assert people.stdout
        programs = run("archive", *command, "--json")
        assert json.loads(programs.stdout)["schema_version"] == 1
    listed = json.loads(run("archive", "list", "--json", packed, plain).stdout)["archives"]
    assert [entry["packed"] for entry in listed] == [True, False]
    inspected = json.loads(run("archive", "inspect", "--json", packed).stdout)
    assert inspected["raw_bytes"] == 120 * 4096
    assert [process["pid"] for process in inspected["processes"]] == [1, 5]


def test_diff_has_its_own_exit_status(archive: Path, tmp_path: Path) -> None:
    make_image_set(tmp_path / "other", {1: mixed_pages(100, seed=7)})
    make_archive(tmp_path / "b.tar", tmp_path / "other")
    assert run("archive", "diff", str(archive), str(archive)).returncode == 0
    assert run("archive", "diff", str(archive), str(tmp_path / "b.tar")).returncode == 1


def test_errors_are_one_line_and_an_exit_status(archive: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.tar"
    cut.write_bytes(archive.read_bytes()[:20000])
    damaged = run("archive", "verify", str(cut))
    assert (damaged.returncode, damaged.stdout) == (4, "")
    assert damaged.stderr.startswith("ocihook: error: ")
    assert damaged.stderr.count("\n") == 1
    assert run("archive", "pack", str(archive), str(archive)).returncode == 3
    assert run("archive", "inspect", __file__).returncode == 6
    assert run("archive", "unpack", str(archive), str(tmp_path / "b.tar")).returncode == 8
    assert run("archive", "verify", str(tmp_path / "none")).returncode == 2
    assert run("no-such-command").returncode == 2


def test_errors_are_json_for_programs(archive: Path, tmp_path: Path) -> None:
    """On stderr, one object on one line: stdout is left to results."""
    for arguments, code, status, word in (
        (["archive", "pack", str(archive), str(archive)], "exists", 3, "exists"),
        (["archive", "inspect", __file__], "archive", 6, "is not a tar archive"),
        (["archive", "list"], "usage", 2, "Missing argument"),
        (["timeline", "--html", str(tmp_path / "none/x.html"), "nothing"], "store", 1, "'nothing'"),
    ):
        done = run(*arguments, "--json")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (status, "", 1)
        error = json.loads(done.stderr)["error"]
        assert error.keys() == {"code", "text", "remedy", "exit_status"}
        assert (error["code"], error["exit_status"], word in error["text"]) == (code, status, True)


def test_errors_of_the_system_are_sentences(tmp_path: Path) -> None:
    """Without a number, with the file and what to do."""
    place = tmp_path / "none" / "metrics.prom"
    done = run("metrics", "--textfile", str(place))
    assert (done.returncode, done.stderr) == (
        1,
        f"ocihook: error: {place}: No such file or directory. See whether the path is right\n",
    )


def test_install_in_a_tree(tmp_path: Path) -> None:
    root = str(tmp_path)
    dry = run("install", "--root", root, "--dry-run")
    assert dry.returncode == 0
    assert "+action-script /usr/local/libexec/ocihook/criu-action" in dry.stdout
    assert list(tmp_path.iterdir()) == []
    assert "wrote" in run("install", "--root", root).stdout
    assert "nothing to change" in run("install", "--root", root).stdout
    changes = json.loads(run("uninstall", "--root", root, "--json", "--dry-run").stdout)["changes"]
    assert {"path": f"{root}/etc/criu/runc.conf", "removed": True} in changes
    assert "removed" in run("uninstall", "--root", root).stdout
    assert "not installed" in run("uninstall", "--root", root).stdout


def test_doctor_for_programs() -> None:
    result = run("doctor", "--json")
    value = json.loads(result.stdout)
    assert result.returncode == (0 if value["will_work"] else 1)
    assert {"check", "status", "detail", "remedy", "can_fix"} == set(value["findings"][0])


def test_sessions_of_a_node_without_any() -> None:
    assert json.loads(run("ps", "--json").stdout)["sessions"] == []


def test_help_imports_none_of_the_commands() -> None:
    code = "import sys; sys.argv = ['ocihook', '--help']; from ocihook.cli.main import main\n"
    code += "try: main()\nexcept SystemExit: pass\nprint(*[m for m in sys.modules if m in ('rich', 'lz4', 'google')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == ""
