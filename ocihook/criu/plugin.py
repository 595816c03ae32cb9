"""Finds CRIU's own CUDA plugin, which must not be loaded where ocihook is.

In a dump it thaws what an engine, or ocihook, has frozen (`set_compel_interrupt_only_mode`): threads then run whose GPU
memory is gone, which ends a job of NCCL's. It has CRIU write down that the restore needs it, and there it resumes every
process before ocihook has made its devices, mapped its GPUs or checked that there is room (plugins/cuda, CRIU 4.2).
"""

from collections.abc import Callable
from pathlib import Path

_NAME = "cuda_plugin.so"
_AMD_GPUS = Path("/dev/kfd")
# Where CRIU is built to look (CR_PLUGIN_DEFAULT): Debian and CRIU itself, Fedora, builds by hand.
_DEFAULT_DIRS = (
    "/usr/lib/criu",
    "/usr/lib64/criu",
    "/usr/local/lib/criu",
    "/usr/local/lib64/criu",
    "/usr/libexec/criu",
)


def find_plugin(directory: str = "", in_tree: Callable[[Path], Path] = Path) -> Path | None:
    """Return the plugin if it is in the directory that CRIU is given, or else in one that it searches by default.

    Args:
        directory: from CRIU's configuration; "": it says nothing.
        in_tree: where a path of the node is.
    """
    places = (Path(place, _NAME) for place in ([directory] if directory else _DEFAULT_DIRS))
    return next((place for place in places if in_tree(place).exists()), None)


def is_to_stay_out(in_tree: Callable[[Path], Path] = Path) -> bool:
    """Return whether CRIU must be given another directory of plugins: it loads a whole directory, or nothing.

    Not where there are AMD GPUs, which need the plugin that a package may have put beside it.
    """
    return find_plugin(in_tree=in_tree) is not None and not in_tree(_AMD_GPUS).exists()
