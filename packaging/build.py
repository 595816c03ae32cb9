"""Builds a package from the staged tree: `build.py deb OUT` with dpkg-deb, `build.py rpm OUT` with rpmbuild.

Neither touches the network, but for wheels that are not there yet. Prints the package's path.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from packaging.version import Version

from ocihook import __version__
from ocihook.node import distribution

HERE = Path(__file__).parent
PROJECT = HERE.parent
DEB_SCRIPTS = ("postinst", "prerm", "postrm")


def main() -> int:
    """Build one package."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("kind", choices=["deb", "rpm"])
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--tree", type=Path, help="a tree that stage.py has made; default: a new one")
    arguments.add_argument("--version", default=package_version(), help="of the package; default: %(default)s")
    arguments.add_argument("--fast", action="store_true", help="compress little, for tests")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SOURCE_DATE_EPOCH", str(last_change()))
    with tempfile.TemporaryDirectory(prefix="ocihook-build-") as directory:
        tree = Path(directory) / "tree"
        if options.tree:
            subprocess.run(["cp", "-a", options.tree, tree], check=True)
        else:
            subprocess.run(
                [sys.executable, HERE / "stage.py", tree], check=True, stdout=subprocess.DEVNULL, cwd=PROJECT
            )
        for page in (tree / "usr/share/man").rglob("*.[1-8]"):
            subprocess.run(["gzip", "-9n", page], check=True)
        build = build_deb if options.kind == "deb" else build_rpm
        print(build(tree, options.out.resolve(), options.version, Path(directory), fast=options.fast))
    return 0


def build_deb(tree: Path, out: Path, version: str, _scratch: Path, *, fast: bool) -> Path:
    """Build a Debian package."""
    machine = subprocess.run(
        ["dpkg", "--print-architecture"], check=True, capture_output=True, text=True
    ).stdout.strip()
    documents = tree / "usr/share/doc/ocihook"
    (documents / "LICENSE").unlink()  # Debian has it at one place
    (documents / "copyright").write_text((HERE / "deb/copyright").read_text() + bundled_licenses(tree))
    changes = (HERE / "deb/changelog").read_text()
    date = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(int(os.environ["SOURCE_DATE_EPOCH"])))
    write_gz(documents / "changelog.gz", changes.replace("@VERSION@", version).replace("@DATE@", date))
    (documents / "CHANGELOG.md").rename(documents / "NEWS.md")
    # No conffile: a purge would take it, and checkpoints that stay may need what it says. postinst puts it in place.
    template = tree / "usr/share/ocihook/config.toml"
    template.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(tree / "etc/ocihook/config.toml", template)
    overrides = tree / "usr/share/lintian/overrides/ocihook"
    overrides.parent.mkdir(parents=True)
    shutil.copy(HERE / "deb/lintian-overrides", overrides)
    control = tree / "DEBIAN"
    control.mkdir(mode=0o755)
    size = sum(path.lstat().st_size for path in tree.rglob("*") if path.is_file()) >> 10
    text = (HERE / "deb/control").read_text()
    for name, value in (("@VERSION@", version), ("@ARCH@", machine), ("@SIZE@", str(size))):
        text = text.replace(name, value)
    (control / "control").write_text(text)
    shutil.copy(HERE / "deb/triggers", control / "triggers")
    for name in DEB_SCRIPTS:
        shutil.copy(HERE / "deb" / name, control / name)
        (control / name).chmod(0o755)
    names = sorted(
        str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file() and control not in path.parents
    )
    sums = subprocess.run(["md5sum", *names], check=True, capture_output=True, text=True, cwd=tree)
    (control / "md5sums").write_text(sums.stdout)
    package = out / f"ocihook_{version}_{machine}.deb"
    subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", "-Zgzip" if fast else "-Zxz", *(["-z1"] * fast), tree, package],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return package


def build_rpm(tree: Path, out: Path, version: str, scratch: Path, *, fast: bool) -> Path:
    """Build an RPM."""
    shutil.move(tree / "usr/share/doc/ocihook/LICENSE", scratch / "LICENSE")
    licenses = tree / "usr/share/licenses/ocihook"
    licenses.mkdir(parents=True)
    shutil.move(scratch / "LICENSE", licenses / "LICENSE")
    (licenses / "BUNDLED").write_text(bundled_licenses(tree))
    listing = scratch / "files"
    listing.write_text("".join(f"{line}\n" for line in rpm_files(tree)))
    defines = {
        "_topdir": scratch / "rpm",
        "_rpmdir": out,
        "_rpmfilename": "%{name}-%{version}-%{release}.%{_arch}.rpm",
        "package_version": version.replace("-", "~"),
        "tree": tree,
        "listing": listing,
        "changed": os.environ["SOURCE_DATE_EPOCH"],
        "_binary_payload": "w1.zstdio" if fast else "w19.zstdio",
        "bundled": " ".join(f"bundled(python3dist({name}))={number}" for name, number, _ in distributions(tree)),
    }
    command = ["rpmbuild", "-bb", "--quiet", *(f"--define={name} {value}" for name, value in defines.items())]
    subprocess.run([*command, HERE / "rpm/ocihook.spec"], check=True)
    return next(out.glob(f"ocihook-{defines['package_version']}-*.rpm"))


def rpm_files(tree: Path) -> list[str]:
    """Return the lines of an RPM's %files: all files, and of the directories those that are nobody else's."""
    lines = []
    for path in sorted(tree.rglob("*")):
        name = f"/{path.relative_to(tree)}"
        if not path.is_dir():
            lines.append(f"{rpm_kind(name)}{name}")
        elif "/ocihook" in name or name == "/etc/criu":
            lines.append(f"%dir {name}")
    return lines


def rpm_kind(name: str) -> str:
    """Return what an RPM marks a file with."""
    if name.startswith("/usr/share/licenses/"):
        return "%license "
    return "%config(noreplace) " if name.startswith("/etc/") else ""


def package_version() -> str:
    """Return our version as dpkg and rpm order it: what comes before a release sorts before it."""
    version = Version(__version__)
    return f"{version.base_version}~dev{version.dev}" if version.is_devrelease else str(version)


def distributions(tree: Path) -> list[tuple[str, str, str]]:
    """Return name, version and license of what the tree bundles."""
    found = []
    for path in sorted(
        (tree / "usr" / distribution.RELEASES_BELOW_PREFIX).glob("*/site-packages/*.dist-info/METADATA")
    ):
        fields = dict(line.split(": ", 1) for line in path.read_text().split("\n\n")[0].splitlines() if ": " in line)
        license_name = fields.get("License-Expression") or fields.get("License") or "see its METADATA"
        found.append((fields["Name"].lower(), fields["Version"], license_name.splitlines()[0]))
    return found


def bundled_licenses(tree: Path) -> str:
    """Return what the tree bundles, in words."""
    rows = "".join(f" {name} {version}: {license_name}\n" for name, version, license_name in distributions(tree))
    return f"What lies in /usr/lib/ocihook beside ocihook, with its license texts beside it:\n{rows}"


def last_change() -> int:
    """Return when the newest of the sources was changed, in seconds since the epoch."""
    return int(max(path.stat().st_mtime for path in (PROJECT / "ocihook").rglob("*.py")))


def write_gz(path: Path, text: str) -> None:
    """Write a compressed file that is the same for the same text."""
    path.write_bytes(subprocess.run(["gzip", "-9n"], input=text.encode(), check=True, capture_output=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
