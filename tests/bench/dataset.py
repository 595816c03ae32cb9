"""Makes the mixed-memory data set that the benchmarks share: what a training process holds, page by page.

25 % zero (17 % in long runs, 8 % in runs of 1 to 8 within heap and optimizer state), 36 % bf16 weights,
9 % random bytes, 15 % fp32 Adam moments, 10 % heap, 5 % Zipf text. The same bytes for the same size.
"""

import sys
from collections.abc import Callable, Iterator
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


def write_next_version(first: Path, second: Path, new_pages: Path, seed: int = 20240612) -> None:
    """Write what the memory of the same process is a while later, and the pages of it that are nowhere in `first`.

    Of 100 pages 4 are new weights in runs of 256 to 4096, 1.5 optimizer state in runs of 64 to 1024, 3 heap with a few
    bytes changed in runs of 1 to 6, 0.5 used for the first time, 0.3 freed; 24 parts are inserted or removed within
    mappings, and 60 % of the mappings lie at another place.
    """
    rng = np.random.default_rng(seed)
    pages = np.fromfile(first, np.uint8).reshape(-1, PAGE)
    _change(rng, pages)
    mappings = np.split(pages, np.sort(rng.choice(len(pages), 227, replace=False)))
    for number in rng.choice(len(mappings), 24, replace=False):
        mapping, length = mappings[number], int(rng.integers(1, 301))
        middle = len(mapping) // 2
        if rng.random() < 0.5:
            mappings[number] = np.concatenate([mapping[:middle], _heap(rng, length), mapping[middle:]])
        else:
            mappings[number] = np.delete(mapping, slice(middle, middle + length), axis=0)
    moved = rng.choice(len(mappings), len(mappings) * 6 // 10, replace=False)
    order = list(range(len(mappings)))
    for place, number in zip(moved, rng.permutation(moved), strict=True):
        order[place] = int(number)
    with second.open("wb") as out:
        for number in order:
            out.write(mappings[number].tobytes())
    _write_new(first, second, new_pages)


def _change(rng: np.random.Generator, pages: Pages) -> None:
    def runs(share: float, low: int, high: int) -> Iterator[slice]:
        left = int(share * len(pages))
        while left > 0:
            length = min(left, int(rng.integers(low, high + 1)))
            start = int(rng.integers(0, len(pages) - length))
            yield slice(start, start + length)
            left -= length

    for share, low, high, make in ((0.04, 256, 4096, _bf16), (0.015, 64, 1024, _adam), (0.005, 1, 64, _heap)):
        for part in runs(share, low, high):
            pages[part] = make(rng, part.stop - part.start)
    for part in runs(0.03, 1, 6):
        pages[part, rng.integers(0, PAGE, 8)] ^= np.uint8(rng.integers(1, 256))
    for part in runs(0.003, 1, 64):
        pages[part] = 0


def _write_new(first: Path, second: Path, new_pages: Path) -> None:
    seen = {page.tobytes() for page in np.fromfile(first, np.uint8).reshape(-1, PAGE)}
    with second.open("rb") as source, new_pages.open("wb") as out:
        while page := source.read(PAGE):
            if page not in seen and any(page):
                seen.add(page)
                out.write(page)


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
    write_dataset(Path(sys.argv[1]), int(sys.argv[5]))
    drop_zero_pages(Path(sys.argv[1]), Path(sys.argv[2]))
    write_next_version(Path(sys.argv[1]), Path(sys.argv[3]), Path(sys.argv[4]))
