"""Makes the mixed-memory data set that the benchmarks share: what a training process holds, page by page.

25 % zero (17 % in long runs, 8 % in runs of 1 to 8 within heap and optimizer state), 36 % bf16 weights,
9 % random bytes, 15 % fp32 Adam moments, 10 % heap, 5 % Zipf text. The same bytes for the same size.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

PAGE = 4096
Pages = npt.NDArray[np.uint8]
Maker = Callable[[np.random.Generator, int], Pages]


def write_dataset(path: Path, size_bytes: int, seed: int = 20240611) -> None:
    """Write `size_bytes` (whole pages) of mixed memory to `path`."""
    rng = np.random.default_rng(seed)
    total = size_bytes // PAGE
    makers: dict[str, tuple[float, Maker]] = {
        "zero": (0.17, _zero),
        "bf16": (0.36, _bf16),
        "random": (0.09, _random),
        "adam": (0.15 + 0.05, _with_holes(_adam)),
        "heap": (0.10 + 0.03, _with_holes(_heap)),
        "text": (0.05, _text),
    }
    left = {name: int(share * total) for name, (share, _) in makers.items()}
    left["zero"] += total - sum(left.values())
    with path.open("wb") as out:
        while any(left.values()):
            names = [name for name, pages in left.items() if pages]
            name = names[rng.integers(len(names))]
            pages = min(left[name], int(rng.integers(256, 8192)))
            left[name] -= pages
            out.write(makers[name][1](rng, pages).tobytes())


def drop_zero_pages(source: Path, target: Path) -> None:
    """Write the pages of `source` that are not zero to `target`."""
    with source.open("rb") as file, target.open("wb") as out:
        while data := file.read(64 << 20):
            pages = np.frombuffer(data, np.uint8).reshape(-1, PAGE)
            out.write(pages[pages.any(axis=1)].tobytes())


def _zero(_rng: np.random.Generator, pages: int) -> Pages:
    return np.zeros((pages, PAGE), np.uint8)


def _random(rng: np.random.Generator, pages: int) -> Pages:
    return rng.integers(0, 256, (pages, PAGE), np.uint8)


def _bf16(rng: np.random.Generator, pages: int) -> Pages:
    scale = np.float32(10.0 ** rng.uniform(-3, 0))
    values = rng.standard_normal((pages, PAGE // 2), np.float32) * scale
    return np.ascontiguousarray((values.view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)


def _adam(rng: np.random.Generator, pages: int) -> Pages:
    values = rng.standard_normal((pages * PAGE // 4), np.float32) * np.float32(1e-3)
    if rng.random() < 0.5:
        values = values * values
    rows = values[: values.size // 320 * 320].reshape(-1, 320)
    rows[rng.random(len(rows)) < 0.30] = 0
    if rng.random() < 0.40:
        values.view(np.uint32)[:] &= np.uint32(0xFFFF0000)
    return values.view(np.uint8).reshape(pages, PAGE)


def _heap(rng: np.random.Generator, pages: int) -> Pages:
    words = rng.integers(0, 1 << 12, (pages, PAGE // 8), np.uint64)
    kind = rng.random((pages, PAGE // 8))
    pointers = np.uint64(0x7F0000000000) + rng.integers(0, 1 << 28, (pages, PAGE // 8), np.uint64) * np.uint64(16)
    words = np.where(kind < 0.35, pointers, words)
    doubles = rng.standard_normal((pages, PAGE // 8)).view(np.uint64)
    words = np.where(kind > 0.92, doubles, words)
    return np.ascontiguousarray(words).view(np.uint8)


def _text(rng: np.random.Generator, pages: int) -> Pages:
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkjqxz", np.uint8)
    vocabulary = [bytes(letters[rng.integers(0, 26, rng.integers(2, 10))]) + b" " for _ in range(20000)]
    ranks = np.minimum(rng.zipf(1.2, pages * PAGE // 6), 20000) - 1
    text = b"".join(vocabulary[r] for r in ranks)
    text = (text * (pages * PAGE // len(text) + 1))[: pages * PAGE]
    return np.frombuffer(text, np.uint8).reshape(pages, PAGE)


def _with_holes(make: Maker) -> Maker:
    def holed(rng: np.random.Generator, pages: int) -> Pages:
        data = np.array(make(rng, pages))
        at = 0
        while at < pages:
            at += int(rng.integers(2, 27))
            run = int(rng.integers(1, 9))
            data[at : at + run] = 0
            at += run
        return data

    return holed


if __name__ == "__main__":
    write_dataset(Path(sys.argv[1]), int(sys.argv[3]))
    drop_zero_pages(Path(sys.argv[1]), Path(sys.argv[2]))
