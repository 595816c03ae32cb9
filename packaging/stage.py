"""Makes the tree that every package and the image consist of, with everything ocihook needs but Python itself.

    stage.py DEST [--prefix /usr] [--wheels DIR]

Below DEST and PREFIX: lib/ocihook/RELEASE/site-packages with the wheels of requirements.txt for every Python of
`PYTHONS` one over another (extension modules carry their ABI in their name, so one tree serves all), bin/ocihook,
libexec/ocihook, and for PREFIX /usr, too, systemd's units, tmpfiles.d, preset, man pages, completions and
documentation. Wheels are checked against the hashes in requirements.txt. Of each only what `KEPT` names is taken; a
dependency that `KEPT` does not know is an error. RELEASE is the version with a hash over all that lies below it.
"""

import argparse
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from ocihook import __version__
from ocihook.cli.manual import configuration
from ocihook.node import distribution
from ocihook.node.install import render, unit_templates

HERE = Path(__file__).parent
PROJECT = HERE.parent
MACHINE = os.uname().machine
CONFIGURATION = Path("etc/ocihook/config.toml")
GLIBC = ("2_34", "2_28", "2_27", "2_26", "2_24", "2_17")  # of RHEL 9, and what came before
LICENSES = ("*.dist-info/METADATA", "*.dist-info/licenses/*", "*.dist-info/LICENSE*")

# What is taken of each distribution; a * stands for slashes, too. Tests import all of ocihook, and what it imports
# late, under every Python.
KEPT: dict[str, tuple[str, ...]] = {
    "backports-zstd": ("backports/zstd/*",),
    "botocore": (  # a sixth of it: object storage, and the services that lead to its credentials
        "botocore/*.py",
        "botocore/cacert.pem",
        "botocore/data/_retry.json",
        "botocore/data/endpoints.json",
        "botocore/data/partitions.json",
        "botocore/data/sdk-default-configuration.json",
        "botocore/data/s3/*",
        "botocore/data/signin/*",
        "botocore/data/sso/*",
        "botocore/data/sso-oidc/*",
        "botocore/data/sts/*",
    ),
    "cffi": ("_cffi_backend.*",),
    "click": ("click/*",),
    "cryptography": ("cryptography/*",),
    "cuda-bindings": (  # a sixth of it: the driver's API
        "cuda/bindings/__init__.py",
        "cuda/bindings/_version.py",
        "cuda/bindings/driver.*",
        "cuda/bindings/cydriver.*",
        "cuda/bindings/_internal/__init__.py",
        "cuda/bindings/_internal/_fast_enum.py",
        "cuda/bindings/_internal/driver.*",
        "cuda/bindings/_internal/utils.*",
        "cuda/bindings/utils/*",
    ),
    "cuda-pathfinder": ("cuda/pathfinder/*",),
    "jmespath": ("jmespath/*",),
    "lz4": ("lz4/__init__.py", "lz4/_version.*", "lz4/version.py", "lz4/block/*"),
    "markdown-it-py": (),  # rich's, for Markdown
    "mdurl": (),
    "nvidia-ml-py": ("pynvml.py",),
    "prometheus-client": ("prometheus_client/*",),
    "protobuf": ("google/protobuf/*", "google/_upb/*"),
    "pycparser": (),  # cffi's, for declarations in C
    "pygments": (),  # rich's, for source code
    "pyroute2": (  # a sixth of it: messages. Python needs no __init__ of it, and that would import all the rest
        "pyroute2/common.py",
        "pyroute2/process.py",
        "pyroute2/statsd.py",
        "pyroute2/config/*",
        "pyroute2/netns/__init__.py",
        "pyroute2/requests/__init__.py",
        "pyroute2/requests/main.py",
        "pyroute2/netlink/__init__.py",
        "pyroute2/netlink/core.py",
        "pyroute2/netlink/coredata.py",
        "pyroute2/netlink/exceptions.py",
        "pyroute2/netlink/marshal.py",
        "pyroute2/netlink/nlsocket.py",
        "pyroute2/netlink/rt_files.py",
        "pyroute2/netlink/diag/__init__.py",
        "pyroute2/netlink/rtnl/__init__.py",
        "pyroute2/netlink/rtnl/ifaddrmsg.py",
        "pyroute2/netlink/rtnl/ifinfmsg/*",
        "pyroute2/netlink/rtnl/iw_event.py",
        "pyroute2/netlink/rtnl/rtmsg.py",
    ),
    "python-dateutil": ("dateutil/*",),
    "rich": ("rich/*",),
    "six": ("six.py",),
    "urllib3": ("urllib3/*",),
    "win-inet-pton": (),  # pyroute2's, for Windows
    "xxhash": ("xxhash/*",),
}
DROPPED = (
    *("*.pyi", "*.pyx", "*.pxd", "*.pxi", "*.h", "*.c", "*.proto", "*/py.typed", "*/tests/*"),
    "botocore/data/*/examples-1.json",
)


def main() -> int:
    """Make the tree."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("dest", type=Path)
    arguments.add_argument("--prefix", type=Path, default=distribution.PACKAGE_PREFIX)
    arguments.add_argument("--wheels", type=Path, default=PROJECT / ".cache/wheels", help="where they are kept")
    options = arguments.parse_args()
    if options.dest.exists():
        raise SystemExit(f"stage: {options.dest} is there already")
    top = options.dest / options.prefix.relative_to("/")
    with tempfile.TemporaryDirectory() as directory:
        site = Path(directory) / "site-packages"
        with ThreadPoolExecutor() as pool:
            for wheels in pool.map(lambda version: fetch_wheels(version, options.wheels), distribution.PYTHONS):
                for wheel in wheels:
                    unpack(wheel, site)
        copy_project(site)
        tidy(site)
        release = f"{__version__}-{tree_hash(site)}"
        place = top / distribution.RELEASES_BELOW_PREFIX / release / "site-packages"
        place.parent.mkdir(parents=True)
        shutil.copytree(site, place)
    add_programs(top, options.prefix, release)
    if options.prefix == distribution.PACKAGE_PREFIX:
        add_node_files(options.dest, top, options.prefix, release)
        add_documents(top)
    set_modes(options.dest)
    print(release)
    return 0


def fetch_wheels(version: str, directory: Path) -> list[Path]:
    """Return the wheels for one Python, downloaded where they are not there yet; pip checks their hashes.

    Markers are evaluated here, since pip would do so for the Python that it runs under.
    """
    place = directory / version
    environment = {"python_version": version, "python_full_version": f"{version}.0"}
    wanted = {}  # lines for pip, by name
    for line in (HERE / "requirements.txt").read_text().replace("\\\n", "").splitlines():
        head, *hashes = line.partition("#")[0].split("--hash=")
        if not head.strip():
            continue
        requirement = Requirement(head)
        if requirement.name not in KEPT:
            raise SystemExit(f"stage: say in KEPT what of {requirement.name} is needed")
        if KEPT[requirement.name] and (requirement.marker is None or requirement.marker.evaluate(environment)):
            options = " ".join(f"--hash={text.strip()}" for text in hashes)
            wanted[requirement.name] = f"{requirement.name}{requirement.specifier} {options}"
    place.mkdir(parents=True, exist_ok=True)
    for old in place.glob("*.whl"):
        name, number, *_ = parse_wheel_filename(old.name)
        if f"{name}=={number} " not in wanted.get(name, ""):
            old.unlink()
    tags = [f"--platform=manylinux_{glibc}_{MACHINE}" for glibc in GLIBC]
    abis = [f"--abi={abi}" for abi in (f"cp{version.replace('.', '')}", "abi3", "none")]
    listing = place / "requirements.txt"
    listing.write_text("\n".join(wanted.values()) + "\n")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    pip += [f"--platform=manylinux2014_{MACHINE}", *tags, *abis, "--implementation=cp", f"--python-version={version}"]
    subprocess.run([*pip, f"--find-links={place}", f"--dest={place}", f"--requirement={listing}"], check=True)
    return sorted(place.glob("*.whl"))


def unpack(wheel: Path, site: Path) -> None:
    """Put what is kept of a wheel into `site`."""
    name = str(parse_wheel_filename(wheel.name)[0])
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            if not entry.is_dir() and is_kept(name, entry.filename):
                archive.extract(entry, site)


def is_kept(distribution: str, name: str) -> bool:
    """Return whether a file of a distribution is taken."""
    return _matches(name, (*KEPT[distribution], *LICENSES)) and not _matches(name, DROPPED)


def copy_project(site: Path) -> None:
    """Copy ocihook itself."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PROJECT / "ocihook", site / "ocihook", ignore=ignore)


def tidy(site: Path) -> None:
    """Take debug symbols from libraries, and from modules the line that would make a program of them."""
    libraries = [str(path) for path in site.rglob("*.so")]
    subprocess.run(["strip", "--strip-unneeded", *libraries], check=True)
    for path in site.rglob("*.py"):
        content = path.read_bytes()
        if content.startswith(b"#!"):
            path.write_bytes(content.partition(b"\n")[2])


def add_programs(top: Path, prefix: Path, release: str) -> None:
    """Put the command, and what packages and the image run, in place."""
    site = prefix / distribution.RELEASES_BELOW_PREFIX / release / "site-packages"
    libexec = top / distribution.LIBEXEC_BELOW_PREFIX
    for source, place in ((HERE / "tree/ocihook", top / "bin/ocihook"), (HERE / "tree/compile", libexec / "compile")):
        write(place, fill(source.read_text(), site), 0o755)
    if prefix == distribution.PACKAGE_PREFIX:
        launcher = (PROJECT / "ocihook/hook/criu-action").read_text()
        write(libexec / "criu-action", fill(launcher, site), 0o755)
        handler = (PROJECT / "ocihook/hook/handler").read_text()
        for runtime in ("runc", "crun"):  # which every distribution has there
            text = fill(handler, site).replace("@RUNTIME@", f"/usr/bin/{runtime}")
            write(libexec / f"ocihook-{runtime}", text, 0o755)
        write(libexec / "oci-hook", fill((PROJECT / "ocihook/hook/oci-hook").read_text(), site), 0o755)


def add_node_files(dest: Path, top: Path, prefix: Path, release: str) -> None:
    """Put in place what systemd reads, and the configuration, which says nothing but the defaults."""
    site = prefix / distribution.RELEASES_BELOW_PREFIX / release / "site-packages"
    for unit in unit_templates():
        write(top / "lib/systemd/system" / unit.name, fill(unit.read_text(), site))
    write(top / "lib/systemd/system-preset/50-ocihook.preset", (HERE / "tree/ocihook.preset").read_text())
    write(top / "lib/tmpfiles.d/ocihook.conf", (HERE / "tree/ocihook.tmpfiles").read_text())
    for directory in ("etc/criu", "etc/ocihook/config.d"):
        (dest / directory).mkdir(parents=True)
    write(dest / CONFIGURATION, configuration())


def add_documents(top: Path) -> None:
    """Put in place what people read, and what shells, Prometheus and security modules are offered."""
    documents = top / "share/doc/ocihook"
    for name in ("README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"):
        write(documents / name, (PROJECT / name).read_text())
    for page in (PROJECT / "docs").glob("*.md"):
        write(documents / "docs" / page.name, page.read_text())
    for source, place in (
        ("completions/bash", "share/bash-completion/completions"),
        ("completions/zsh", "share/zsh/vendor-completions"),
        ("completions/fish", "share/fish/vendor_completions.d"),
        ("prometheus", "share/ocihook/prometheus"),
        ("apparmor", "share/ocihook/apparmor"),
        ("selinux", "share/ocihook/selinux"),
        ("../hooks.d", "share/containers/oci/hooks.d"),  # unpacked after what it names, and removed before
    ):
        if (HERE / source).is_dir():
            shutil.copytree(HERE / source, top / place)
    for page in (HERE / "man").glob("*.[1-8]"):
        write(top / "share/man" / f"man{page.suffix[1:]}" / page.name, page.read_text())


def fill(template: str, site: Path) -> str:
    """Fill in a template as a part of the package."""
    launchers = " ".join(f"'/usr/bin/python{version}'" for version in distribution.PYTHONS)
    text = template.replace("@PYTHONS@", launchers).replace("@COMMAND@", str(site.parents[3] / "bin/ocihook"))
    return render(text, "Of the package ocihook; an update replaces it", site)


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file of the tree."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def set_modes(dest: Path) -> None:
    """Give every file the mode it is to have, whatever the umask and the wheels say."""
    for path in files(dest):
        is_program = path.parent.name == "bin" or path.parent.match("libexec/ocihook")
        path.chmod(0o755 if is_program else 0o644)
    for path in (dest, *(path for path in dest.rglob("*") if path.is_dir())):
        path.chmod(0o755)


def tree_hash(directory: Path) -> str:
    """Return a hash over names and content of all files."""
    found = hashlib.sha256()
    for path in files(directory):
        found.update(f"{path.relative_to(directory)}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:12]


def files(directory: Path) -> Iterator[Path]:
    """Return all files below a directory, always in the same order."""
    return iter(sorted(path for path in directory.rglob("*") if path.is_file()))


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    sys.exit(main())
