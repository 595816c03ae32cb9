"""Tar files as hostile input: Python's tarfile believes what headers say, and takes memory and time without bounds.

Formats: pax (POSIX.1-2001), GNU's long names and sparse files.
"""

import errno
import re
import sys
import tarfile
from tarfile import EmptyHeaderError, EOFHeaderError, HeaderError, ReadError  # type: ignore[attr-defined]
from typing import IO, Any, Protocol, Self, TypeVar, cast

_H = TypeVar("_H", bound=tarfile.TarInfo)

# What tarfile lets out; the last three where numbers in a header make no sense.
READ_ERRORS = (tarfile.TarError, EOFError, ArithmeticError, LookupError, ValueError)
MAX_MEMBER_BYTES = 1 << 60  # far above any file, and offsets up to there are what seek can be asked for

# Headers that hold a name or attributes for the member after them. tarfile keeps them in memory, whatever they claim.
_EXTENSIONS = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, b"X")
_MAX_EXTENSION_BYTES = 256 << 10  # an attribute of a file has 64 KiB at most
_MAX_HEADERS = 16  # of one member: tarfile calls itself for each
_MAX_HEADERS_BYTES = 1 << 20  # of one member, the map of a sparse one included
_MAX_GLOBAL_BYTES = 64 << 10  # copied for every member
_MAX_NAME_BYTES = 4096  # PATH_MAX
_MAX_NAMES_BYTES = 64 << 20  # of all members, with what Python takes for each
_NAME_OVERHEAD_BYTES = 200
_MAX_PARTS = 1 << 16  # of a sparse file
_MAX_DIGITS = 256  # in a row: tarfile's regular expressions start over at each
_SKIP_BYTES = 1 << 20
_RECORD = re.compile(rb"([0-9]{1,7}) ")
_DIGITS = bytes.maketrans(b"123456789", b"000000000")


class _Seekable(Protocol):
    def read(self, size: int, /) -> bytes: ...
    def seek(self, offset: int, /) -> int: ...
    def tell(self) -> int: ...


class _Header(tarfile.TarInfo):
    """A header that is refused if it is damaged. tarfile itself takes some damaged ones, and no more, for the end."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        cast("Tar", tarfile).count_header()
        try:
            return super().fromtarfile(tarfile)
        except EOFHeaderError:
            raise
        except EmptyHeaderError as error:
            raise ReadError("it has no end") from error
        except HeaderError as error:
            raise ReadError(str(error)) from error

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        return _checked(super().frombuf(buf, encoding, errors))

    @classmethod
    def _frombuf(cls, *arguments: object, **options: object) -> Self:
        """Be what Pythons of 2025 and later, and Debian's, read archives with in place of `frombuf`."""
        header: Self = getattr(super(), "_frombuf")(*arguments, **options)  # noqa: B009 - not in all
        return _checked(header)

    def _proc_pax(self, tarfile: "Tar") -> Self:
        """Look at attributes before tarfile does: older ones take time and memory by the square of their size."""
        _check_records(tarfile.source.peek(self.size))
        header: Self = getattr(super(), "_proc_pax")(tarfile)  # noqa: B009 - typeshed does not have it
        return header


def _checked(header: _H) -> _H:
    if not 0 <= header.size < MAX_MEMBER_BYTES or (header.type in _EXTENSIONS and header.size > _MAX_EXTENSION_BYTES):
        raise ReadError(f"a header claims {header.size} bytes")
    return header


def _check_records(data: bytes) -> None:
    """Check that data is a row of records LENGTH KEY=VALUE, each with a line feed; zeros may be behind them."""
    if b"0" * _MAX_DIGITS in data.translate(_DIGITS):
        raise ReadError("an attribute has a number that is none")
    position = 0
    while position < len(data) and data[position]:
        length = _RECORD.match(data, position)
        end = position + int(length[1]) if length else 0
        if not length or not length.end() < data.find(b"=", length.end(), end) or data[end - 1 : end] != b"\n":
            raise ReadError("an attribute is malformed")
        position = end


class _Forward:
    """A stream that goes back no further than to where the last read began, as tarfile never does."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._position = self._start = 0
        self._kept = b""  # from `_start` on

    def read(self, size: int, /) -> bytes:
        """Return so many bytes, fewer at the end."""
        at = self._position - self._start
        data = self._kept[at : at + size]
        if len(data) < size and (more := self._stream.read(size - len(data))):
            data += more
            self._start, self._kept = self._position, data
        self._position += len(data)
        return data

    def seek(self, offset: int, /) -> int:
        """Go to an offset, or to the end if that comes before."""
        if offset < self._start:
            raise ReadError("its members overlap")
        while self._position < offset and self.read(min(offset - self._position, _SKIP_BYTES)):
            pass
        self._position = min(self._position, offset)
        return self._position

    def tell(self) -> int:
        """Return the offset."""
        return self._position


class _Source:
    """A tar's bytes as tarfile reads them, so many at most while it reads headers."""

    def __init__(self, file: _Seekable) -> None:
        self._file = file
        self.left_bytes = sys.maxsize
        self.tell = file.tell

    def seek(self, offset: int) -> int:
        """Go to an offset.

        Raises:
            ReadError: if no file can have it.
        """
        try:
            return self._file.seek(offset)
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise ReadError("a size in it is impossible") from error
            raise

    def read(self, size: int) -> bytes:
        """Return so many bytes, fewer at the end.

        Raises:
            ReadError: if they are more than may still be read.
        """
        self.left_bytes -= size
        if self.left_bytes < 0:
            raise ReadError(f"the headers of a member take more than {_MAX_HEADERS_BYTES} bytes")
        return self._file.read(size)

    def peek(self, size: int) -> bytes:
        """Return what a read would."""
        start = self._file.tell()
        data = self._file.read(size)
        self._file.seek(start)
        return data

    def seekable(self) -> bool:
        """Tell that it is, as far as tarfile needs it."""
        return True


class Tar(tarfile.TarFile):
    """A tar to be read once, member by member, in bounded memory: 64 MiB for their names, a few for their headers.

    Every method raises one of READ_ERRORS where it is damaged or hostile.
    """

    members: list[tarfile.TarInfo]

    def __init__(self, file: IO[bytes], *, is_stream: bool) -> None:
        """Read the first header of a tar in a file, which is sought in, or in a stream, all of which is read."""
        self.source = _Source(_Forward(file) if is_stream else cast("_Seekable", file))
        self._headers = self._names_bytes = 0
        super().__init__(mode="r", fileobj=cast("Any", self.source), tarinfo=_Header)

    def next(self) -> tarfile.TarInfo | None:
        """Return the next member, None at the end."""
        self._headers = 0
        self.source.left_bytes = _MAX_HEADERS_BYTES
        info = super().next()
        self.source.left_bytes = sys.maxsize
        self.members.clear()
        if info is not None:
            self._check_bounds(info)
        return info

    def count_header(self) -> None:
        """Count one of the headers that the next member has.

        Raises:
            ReadError: if they are too many.
        """
        self._headers += 1
        if self._headers > _MAX_HEADERS:
            raise ReadError(f"a member has more than {_MAX_HEADERS} headers")

    def _check_bounds(self, info: tarfile.TarInfo) -> None:
        self._names_bytes += len(info.name) + _NAME_OVERHEAD_BYTES
        if len(info.name) > _MAX_NAME_BYTES or self._names_bytes > _MAX_NAMES_BYTES:
            raise ReadError("its names are too long, or too many")
        if sum(len(key) + len(value) for key, value in self.pax_headers.items()) > _MAX_GLOBAL_BYTES:
            raise ReadError(f"attributes for all members take more than {_MAX_GLOBAL_BYTES} bytes")
        parts, end = _parts(info), 0
        for offset, size in parts:
            if not size:  # GNU's headers have room for more parts than there are
                continue
            if offset < end or size < 0 or len(parts) > _MAX_PARTS:
                raise ReadError(f"the parts of a sparse file overlap, or are more than {_MAX_PARTS}")
            end = offset + size
        if end > info.size:
            raise ReadError("a sparse file has parts behind its end")


def hole_bytes(info: tarfile.TarInfo) -> int:
    """Return how many bytes of a member are zeros that its tar does not have."""
    return info.size - sum(size for _, size in _parts(info)) if info.issparse() else 0


def _parts(info: tarfile.TarInfo) -> list[tuple[int, int]]:
    """Return offset and size of what a tar has of a sparse file."""
    return cast("list[tuple[int, int]]", info.sparse or [])
