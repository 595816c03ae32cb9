"""A real browser for pages that we write: what it says of them, and what it paints."""

import struct
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

TIMEOUT_S = 180.0
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


class Shown(NamedTuple):
    """The state of a page after it was loaded."""

    dom: str
    console: list[str]  # errors and warnings of the page itself
    network_log: str
    background: tuple[int, ...]  # of its first pixel


def show(page: Path, *, is_dark: bool = False) -> Shown:
    """Open a page in headless Chromium."""
    with tempfile.TemporaryDirectory(prefix="ocihook-browser-") as scratch:
        log, picture = Path(scratch, "net.json"), Path(scratch, "page.png")
        scheme = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
        done = subprocess.run(
            [
                *("chromium", *_FLAGS, *scheme, f"--user-data-dir={scratch}", "--enable-logging=stderr"),
                *(f"--log-net-log={log}", f"--screenshot={picture}", "--dump-dom", f"file://{page}"),
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        console = [line for line in done.stderr.splitlines() if ":CONSOLE:" in line]
        return Shown(done.stdout, console, log.read_text(), _first_pixel(picture.read_bytes()))


def _first_pixel(png: bytes) -> tuple[int, ...]:
    """Return the first pixel of a PNG of 8 bits a channel: whatever a row's filter is, it is stored as it is."""
    position, data, channels = 8, b"", 0
    while position < len(png):
        size, kind = struct.unpack_from(">I4s", png, position)
        body = png[position + 8 : position + 8 + size]
        if kind == b"IHDR":
            channels = {2: 3, 6: 4}[body[9]]
        data += body if kind == b"IDAT" else b""
        position += size + 12
    return tuple(zlib.decompress(data)[1 : 1 + channels])
