"""Damages files as a bad disk does."""

from pathlib import Path


def flip_bit(path: Path, offset: int) -> None:
    """Change one bit of the byte at an offset; once more, and it is as it was."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
