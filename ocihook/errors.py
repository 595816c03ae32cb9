"""Every error a user can meet: what happened, and what to do about it.

OcihookError
├─ ConfigError              a key or value in the configuration or in an annotation is wrong
├─ UnsupportedError         this node, or this container, cannot do what was asked
├─ IdentificationError      CRIU's caller or its container cannot be told
├─ AdmissionError           a container may not have what it asks for: another's checkpoint, a key of the policy
├─ FreezeError              a container could not be thawed or frozen again
├─ TraceError               a process could not be held, or made to give memory back
├─ QuiesceError             an application did not answer before its dump
├─ GivenUp                  whoever wanted something done is gone (linux/patience.py)
├─ PreflightError           something in the container could not be restored; nothing was touched
├─ CudaError                the driver refused a checkpoint call (`result` is its CUresult)
│  ├─ CudaLockTimeout       CUDA calls did not end in time; the process runs on
│  ├─ CudaStateError        the process is not in the state that a verb needs
│  └─ CudaUnsupported       there is no driver, or it cannot checkpoint
├─ ImageError               CRIU's own images are missing, truncated or not what they say
├─ StoreError
│  ├─ IntegrityError        a pack or manifest is damaged, incomplete or not ours
│  ├─ StoreFull             no space left for packs or for rehydrated images
│  └─ KeyMissing            a domain is encrypted, and its key cannot be got
├─ RemoteError              a remote cannot be reached, or has not what it should
│  └─ RegistryError         a registry cannot be reached, refuses, or sent something wrong (`status` is HTTP's)
├─ ArchiveError             a checkpoint archive is malformed or hostile
├─ CriuError                CRIU has failed, for a cause that its log tells (criu/explain.py)
├─ AgentError               the agent cannot be reached, or gave no verdict
└─ WorkerDied               a forked worker was killed, or ran out of memory (linux/workers.py)

`code` crosses the socket and stands in JSON output; `exit_code` is the command line's.
"""


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
    """CRIU's caller or its container cannot be told."""

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


class GivenUp(OcihookError):
    """Whoever wanted a dump or restore does not wait for it any more; what was done for it is undone."""

    code = "given-up"


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
    """A checkpoint archive is malformed or hostile."""

    code = "archive"
    exit_code = 4


class RegistryError(RemoteError):
    """A registry cannot be reached, refuses what was asked, or sent something wrong.

    `status` is the answer's HTTP status; 0 if there was no answer, or if its content was the fault.
    """

    code = "registry"

    def __init__(self, message: str, *, status: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class CriuError(OcihookError):
    """CRIU has failed, for a cause that its log tells."""

    def __init__(self, message: str, *, cause: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = f"criu-{cause}"


class AgentError(OcihookError):
    """The agent cannot be reached, or gave no verdict."""

    code = "agent"
    exit_code = 7
