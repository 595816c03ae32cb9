"""Every error a user can meet: what happened, and what to do about it.

OcihookError
├─ ConfigError              a key or value in the configuration or in an annotation is wrong
├─ UnsupportedError         this node, or this container, cannot do what was asked
├─ IdentificationError      CRIU's caller or its container is not known
├─ AdmissionError           a container may not have what it asks for: another's checkpoint, a key of the policy
├─ FreezeError              a container could not be thawed or frozen again
├─ TraceError               a process could not be held, or made to give memory back
├─ QuiesceError             an application did not answer before its dump
├─ GangError                the members of a gang have not come to one end; none is dumped, or restored
├─ GivenUp                  whoever wanted something done is gone (linux/patience.py)
├─ StateLost               a part of a container's state is not in its checkpoint, or is not restored
├─ PreflightError           something in the container could not be restored; nothing was touched
├─ CudaError                the driver refused a checkpoint call (`result` is its CUresult)
│  ├─ CudaLockTimeout       CUDA calls did not end in time; the process runs on
│  ├─ CudaStateError        the process is not in the state that a verb needs
│  └─ CudaUnsupported       there is no driver, or it cannot checkpoint
├─ ImageError               CRIU's own images are missing, truncated or not what they say
├─ StoreError
│  ├─ IntegrityError        a pack or manifest is damaged, incomplete or not ours
│  │  └─ SnapshotLost       the copy of a container's memory ended before it was read
│  ├─ NoCheckpoint          there is none that a container could go on from
│  ├─ StoreFull             no space left for packs or for rehydrated images
│  └─ KeyMissing            a domain is encrypted, and its key cannot be got
├─ RemoteError              a remote cannot be reached, or has not what it should
│  └─ RegistryError         a registry cannot be reached, refuses, or sent something wrong (`status` is HTTP's)
├─ ArchiveError             a file is not a checkpoint archive, or a hostile one
│  └─ ArchiveDamaged        an archive is cut short or damaged
├─ ArchiveKindError         an archive is packed, thin or plain, and the command is for another kind
├─ OutputExists             a command would write over something
├─ RestoreError             a container could not go on from a checkpoint (runtime/restoring.py)
│  └─ CheckpointInUse       another container runs from it, or is being restored
├─ CriuError                CRIU has failed, for a cause that its log shows (criu/explain.py)
├─ AgentError               the agent cannot be reached, or gave no verdict
├─ FileError                the system refused to read or write a file
└─ WorkerDied               a forked worker was killed, or ran out of memory (linux/workers.py)

`code` crosses the socket and stands in JSON output; `exit_code` is the command line's. What a number means stands in
cli/main.py.
"""

import errno
import os


class OcihookError(Exception):
    """Base of all errors that are reported without a traceback."""

    code = "error"
    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = str(self.args[0])
        return f"{message.rstrip('.')}. {self.hint[0].upper()}{self.hint[1:]}" if self.hint else message


class ConfigError(OcihookError):
    """A key or value in the configuration or in an annotation is wrong."""

    code = "config"
    exit_code = 2


class UnsupportedError(OcihookError):
    """This node, or this container, cannot do what was asked."""

    code = "unsupported"
    exit_code = 5


class IdentificationError(OcihookError):
    """CRIU's caller or its container is not known."""

    code = "identification"


class AdmissionError(OcihookError):
    """A container may not have what it asks for: another's checkpoint, a key of the policy."""

    code = "admission"


class FreezeError(OcihookError):
    """A container could not be thawed or frozen again."""

    code = "freeze"


class TraceError(OcihookError):
    """A process could not be held, or made to give memory back."""

    code = "trace"


class QuiesceError(OcihookError):
    """An application did not answer before its dump."""

    code = "quiesce"


class GangError(OcihookError):
    """The members of a gang have not come to one end: none of them is dumped, or restored."""

    code = "gang"


class MembersMissing(GangError):
    """Members of the gang do not come: they have ended, or are not stopped."""


class DumpUnderWay(GangError):
    """The gang is being dumped: which dump its members are restored from is chosen afterwards."""


class GivenUp(OcihookError):
    """Whoever wanted a dump or restore does not wait for it any more; what was done for it is undone."""

    code = "given-up"


class StateLost(OcihookError):
    """A part of a container's state is not in its checkpoint, or differs after a restore; it runs without."""

    code = "state-lost"


class PreflightError(UnsupportedError):
    """Something in the container could not be restored; nothing was touched."""

    code = "preflight"


class CudaError(OcihookError):
    """The driver refused a checkpoint call."""

    code = "cuda"

    def __init__(self, message: str, *, result: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.result = result


class CudaLockTimeout(CudaError):
    """CUDA calls did not end in time; the process runs on."""

    code = "cuda-lock-timeout"


class CudaStateError(CudaError):
    """The process is not in the state that a verb needs."""

    code = "cuda-state"


class CudaUnsupported(CudaError):
    """There is no driver, or it cannot checkpoint."""

    code = "cuda-unsupported"
    exit_code = 5


class ImageError(OcihookError):
    """CRIU's own images are missing, truncated or not what they say."""

    code = "image"
    exit_code = 4


class StoreError(OcihookError):
    """Packs or manifests could not be written or read."""

    code = "store"


class IntegrityError(StoreError):
    """A pack or manifest is damaged, incomplete or not ours."""

    code = "integrity"
    exit_code = 4


class SnapshotLost(IntegrityError):
    """The copy of a container's memory ended before it was read: there is no checkpoint. The container runs on."""

    code = "snapshot-lost"


class NoCheckpoint(StoreError):
    """There is no checkpoint that a container could go on from."""

    code = "no-checkpoint"


class ProgramChanged(NoCheckpoint):
    """The container is to run another program than the one that was checkpointed."""

    code = "program-changed"


class StoreFull(StoreError):
    """No space is left for packs or for rehydrated images."""

    code = "store-full"
    exit_code = 9


class KeyMissing(StoreError):
    """A domain is encrypted, and its key cannot be got."""

    code = "key-missing"


class RemoteError(OcihookError):
    """A remote cannot be reached, or has not what it should."""

    code = "remote"
    exit_code = 10


class ArchiveError(OcihookError):
    """A file is not a checkpoint archive, or a hostile one."""

    code = "archive"
    exit_code = 6


class ArchiveDamaged(ArchiveError):
    """An archive is cut short or damaged."""

    code = "archive-damaged"
    exit_code = 4


class ArchiveKindError(OcihookError):
    """An archive is packed, thin or plain, and the command is for another kind."""

    code = "archive-kind"
    exit_code = 8


class OutputExists(OcihookError):
    """A command would write over something."""

    code = "exists"
    exit_code = 3


class RegistryError(RemoteError):
    """A registry cannot be reached, refuses what was asked, or sent something wrong.

    `status` is the answer's HTTP status; 0 if there was no answer, or if its content was the fault.
    """

    code = "registry"

    def __init__(self, message: str, *, status: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class RestoreError(OcihookError):
    """A container could not go on from a checkpoint."""

    code = "restore"


class CheckpointInUse(RestoreError):
    """Another container runs from a checkpoint, or is being restored from it."""


class CriuError(OcihookError):
    """CRIU has failed, for a cause that its log shows."""

    def __init__(self, message: str, *, cause: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = f"criu-{cause}"


class AgentError(OcihookError):
    """The agent cannot be reached, or gave no verdict."""

    code = "agent"
    exit_code = 7


class FileError(OcihookError):
    """The system refused to read or write a file."""

    code = "file"


_REMEDIES = {
    errno.EACCES: "run it as root, or as who owns the file",
    errno.EPERM: "run it as root, or as who owns the file",
    errno.ENOENT: "see whether the path is right",
    errno.ENOTDIR: "see whether the path is right",
    errno.EISDIR: "name a file, not a directory",
    errno.EEXIST: "remove it, or name another place",
    errno.EROFS: "name a place on a file system that can be written",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or raise the quota",
    errno.EIO: "see the kernel's log (`dmesg`): the disk may be failing",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "raise the node's limit of open files (sysctl fs.file-max)",
    errno.ENOMEM: "free memory",
}


def printable(text: str) -> str:
    """Return one line that no terminal takes for a command, whatever an archive or a container put into it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain(error: BaseException) -> str:
    """Return an error in words; one of the system's says which file and why, and leaves its number out."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    why = reason(error)
    names = [os.fsdecode(n) for n in (error.filename, error.filename2) if isinstance(n, str | bytes | os.PathLike)]
    return f"{' and '.join(names)}: {why}" if names else why


def reason(error: BaseException) -> str:
    """Return the same without the file, for a sentence that names it."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    return error.strerror


def from_system(error: OSError) -> OcihookError:
    """Return the message for a user of an error that nothing else has explained."""
    hint = _REMEDIES.get(error.errno or 0, "")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(plain(error), hint=hint)
    return FileError(plain(error), hint=hint)
