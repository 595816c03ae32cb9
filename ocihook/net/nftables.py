"""Rules of a network namespace, changed by libnftables, as CRIU does it: one call is one transaction.

The library comes with every CRIU that can lock a network by nftables. Its calls are in <nftables/libnftables.h>.
"""

import ctypes
import re
from functools import cache

from ocihook.errors import UnsupportedError
from ocihook.net.namespace import NetNamespace

LIBRARY = "libnftables.so.1"
_TABLE = re.compile(r"^table (\w+) (\S+)$", re.MULTILINE)


class RulesRefused(UnsupportedError):
    """The kernel, or libnftables, does not accept rules."""

    code = "nftables"


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(LIBRARY)
    for name in ("nft_ctx_buffer_output", "nft_ctx_buffer_error", "nft_ctx_free"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
    for name in ("nft_ctx_get_output_buffer", "nft_ctx_get_error_buffer"):
        getattr(library, name).argtypes = [ctypes.c_void_p]
        getattr(library, name).restype = ctypes.c_char_p
    library.nft_ctx_new.argtypes, library.nft_ctx_new.restype = [ctypes.c_uint32], ctypes.c_void_p
    library.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    return library


def has_nftables() -> bool:
    """Return whether the library is installed."""
    try:
        _library()
    except OSError:
        return False
    return True


def run(namespace: NetNamespace, commands: str) -> str:
    """Run nftables commands in a namespace, all or none; return what they print.

    Raises:
        RulesRefused: with what libnftables says.
        FileNotFoundError: if the namespace is gone.
    """
    try:
        library = _library()
    except OSError as error:
        raise RulesRefused(
            f"{LIBRARY} is not installed", hint="install libnftables, or the package nftables"
        ) from error
    status, output, said = namespace.run(lambda: _run(library, commands))
    if status != 0:
        raise RulesRefused(f"rules for network namespace {namespace.inode} were refused: {said.strip()}")
    return output


def _run(library: ctypes.CDLL, commands: str) -> tuple[int, str, str]:
    context = library.nft_ctx_new(0)
    if not context:
        return -1, "", "no memory"
    try:
        library.nft_ctx_buffer_output(context)
        library.nft_ctx_buffer_error(context)
        status = library.nft_run_cmd_from_buffer(context, commands.encode())
        output, said = library.nft_ctx_get_output_buffer(context), library.nft_ctx_get_error_buffer(context)
        return status, (output or b"").decode(errors="replace"), (said or b"").decode(errors="replace")
    finally:
        library.nft_ctx_free(context)


def tables(namespace: NetNamespace) -> list[tuple[str, str]]:
    """Return family and name of each table in a namespace; as `run`."""
    return _TABLE.findall(run(namespace, "list tables"))
