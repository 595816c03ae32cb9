"""The demo's container: holds mixed memory, counts, and on SIGUSR1 prints a checksum over all of it.

Runs under any Python 3 with nothing but the standard library, and without ocihook.
"""

import hashlib
import mmap
import os
import random
import signal
import sys
import time

MIB = 1 << 20


def fill(size_mib: int) -> mmap.mmap:
    """Return memory with a quarter of zero pages, random bytes (as weights are), counters and text, in runs."""
    memory = mmap.mmap(-1, size_mib * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    chooser = random.Random(1)  # noqa: S311 - the same layout each time
    words = [os.urandom(4).hex() for _ in range(512)]
    text = " ".join(chooser.choice(words) for _ in range(MIB // 9 + 1)).encode()[:MIB]
    counters = b"".join((number * 4096 & 0xFFFFFF).to_bytes(8, "little") for number in range(MIB // 8))
    zeros = bytes(MIB)
    for number in range(size_mib):
        kind = number % 8
        memory.write(zeros if kind < 2 else os.urandom(MIB) if kind < 6 else counters if kind == 6 else text)
    return memory


def main() -> None:
    memory = fill(int(sys.argv[1]))
    count = 0

    def print_checksum(*_: object) -> None:
        digest = hashlib.blake2b(memory, digest_size=16).hexdigest()
        print(f"checksum {digest} at {count}", flush=True)

    signal.signal(signal.SIGUSR1, print_checksum)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        count += 1
        print(f"count {count}", flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main()
