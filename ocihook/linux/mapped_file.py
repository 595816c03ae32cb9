"""A file read from the page cache without a copy; what cannot be read is an error, not a signal."""

import mmap
import os
from functools import cached_property

_MADV_POPULATE_READ = 22  # linux/mman.h, since Linux 5.14
_WINDOW_BYTES = 1 << 18  # populated at a time: small calls are slow; at least what disks read ahead


class MappedFile:
    """A file that does not change while it is read, mostly in order. Mapped when it is first read.

    The mapping lives as long as this object, or any view of it. Its page table takes 1/512 of its size.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Use an open file, of which only so many bytes are read."""
        self._fd = fd
        self._size_bytes = size_bytes
        self._ready, self._ready_at = memoryview(b""), 0

    def read(self, offset: int, size: int) -> memoryview:
        """Return bytes, which are read-only; fewer if the file has become shorter.

        Raises:
            OSError: if they cannot be read.
        """
        at = offset - self._ready_at
        if at < 0 or at + size > len(self._ready):
            self._ready, self._ready_at, at = self._make_ready(offset, size), offset, 0
        return self._ready[at : at + size]

    def _make_ready(self, offset: int, size: int) -> memoryview:
        start = offset - offset % mmap.PAGESIZE
        end = min(offset + max(size, _WINDOW_BYTES), self._size_bytes)
        try:
            # A read error would be a SIGBUS in the code that uses a page that is not there yet.
            self._mapping.madvise(_MADV_POPULATE_READ, start, end - start)
        except (OSError, ValueError):  # an older kernel, a file system that maps nothing, or a page that cannot be read
            return memoryview(os.pread(self._fd, size, offset))
        return self._view[offset:end]

    @cached_property
    def _mapping(self) -> mmap.mmap:
        return mmap.mmap(self._fd, self._size_bytes, prot=mmap.PROT_READ)

    @cached_property
    def _view(self) -> memoryview:
        return memoryview(self._mapping)
