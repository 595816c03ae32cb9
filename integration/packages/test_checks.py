"""What others check packages with, and every module of the tree under every Python that is here."""

import os
import shutil
import subprocess
from pathlib import Path

from integration.packages.conftest import Built, MakeNode, copy_to
from ocihook.node.distribution import PYTHONS

PROJECT = Path(__file__).parents[2]
MAX_BYTES = 12 << 20
# All of ocihook, and what it imports late.
IMPORT_ALL = """
import importlib, os, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import ocihook
for module in pkgutil.walk_packages(ocihook.__path__, "ocihook."):
    if module.name not in ("ocihook.__main__", "ocihook.node.demo_workload"):
        importlib.import_module(module.name)
from cuda.bindings import driver
import pynvml
from ocihook.cli.render import print_table, progress_bar
from ocihook.container.engine_archive import zstd
from ocihook.net.namespace import NetNamespace
from ocihook.net.netlink import destroy, inet_sockets, links, routes, unix_sockets
here = NetNamespace.of(os.getpid())
links(here), routes(here), unix_sockets(here), destroy(here, inet_sockets(here)[:0])
print_table(["A"], [["b"]])
driver.CUcheckpointRestoreArgs().gpuPairs
import rich.progress
assert zstd.decompress(zstd.compress(b"x")) == b"x"
foreign = [m for m in map(lambda m: getattr(m, "__file__", None) or "", sys.modules.values()) if "-packages" in m]
assert all(name.startswith(sys.argv[1]) for name in foreign), foreign
print("imported")
"""


def run_in(root: Path, directory: Path, *command: str) -> str:
    """Run a command in a root tree that has `directory` as /mnt; return what it prints."""
    mounts = 'mount --bind "$1" "$2/mnt" && mount --bind /proc "$2/proc" && cd "$2/mnt"'
    enter = mounts + ' && shift 2 && exec chroot .. sh -c \'cd /mnt && exec "$@"\' sh "$@"'
    inside = ["unshare", "--mount", "sh", "-ec", enter, "sh", str(directory), str(root), *command]
    return subprocess.run(
        inside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False
    ).stdout


def test_every_module_loads_under_every_python_here(built: Built, roots: Path) -> None:
    site = built.tree / "usr/lib/ocihook" / built.release / "site-packages"
    forky = Path(os.environ.get("OCIHOOK_FORKY_ROOT", "/var/cache/ocihook/forky"))
    found = set()
    for root in (roots / "bookworm", roots / "trixie", forky):
        for version in PYTHONS:
            if (root / f"usr/bin/python{version}").exists():
                done = run_in(root, site, f"python{version}", "-ISB", "-c", IMPORT_ALL, "/mnt")
                assert done.endswith("imported\n"), done
                found.add(version)
    assert {"3.11", "3.13"} <= found


def test_packages_are_small_and_nothing_is_wrong_with_them(built: Built, roots: Path, scratch: Path) -> None:
    deb, rpm = (Path(shutil.copy(package, scratch)) for package in (built.debs[0], built.rpms[0]))
    assert max(deb.stat().st_size, rpm.stat().st_size) <= MAX_BYTES
    shutil.copy(PROJECT / "packaging/rpm/rpmlint.toml", scratch)
    assert run_in(roots / "checks", scratch, "lintian", "--allow-root", "--fail-on=error,warning", deb.name) == ""
    checked = run_in(roots / "checks", scratch, "rpmlint", "--config=rpmlint.toml", rpm.name)
    assert "0 errors, 0 warnings" in checked, checked


def test_selinux_module_compiles(roots: Path, scratch: Path) -> None:
    shutil.copytree(PROJECT / "packaging/selinux", scratch, dirs_exist_ok=True)
    compile_all = (
        "checkmodule -M -m -o ocihook.mod ocihook.te && semodule_package -o ocihook.pp -m ocihook.mod -f ocihook.fc"
    )
    assert run_in(roots / "checks", scratch, "sh", "-c", compile_all) == ""
    assert (scratch / "ocihook.pp").stat().st_size > 1000


def test_tmpfiles_are_made_for_root_only(built: Built, make_node: MakeNode) -> None:
    node = make_node("trixie")
    (deb,) = copy_to(node, built.debs[0])
    node.run("dpkg", "--install", deb)
    node.run("systemd-tmpfiles", "--create", "ocihook.conf")
    for directory in ("/run/ocihook", "/var/lib/ocihook"):
        assert node.namespace.path(directory).stat().st_mode & 0o777 == 0o700
