"""What a session does to the node, as an object that knows its own inverse; and the facts that it finds, with types.

An effect is in the journal before it is made. Its inverse may run at any instruction later, more than once, in another
process, and long after CRIU is gone: what it still has to do it reads from the node itself, or from the progress that
the effect has recorded.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ocihook.errors import OcihookError
from ocihook.linux.patience import Patience
from ocihook.session.record import from_json, to_json

if TYPE_CHECKING:
    from ocihook.session.journal import Journal


@dataclass(kw_only=True)
class Effect(ABC):
    """Something that a session did, or is about to do."""

    kind: ClassVar[str]
    ends_with_stage: ClassVar[bool] = True  # a stage that was interrupted undoes it before it starts over
    holds_container: ClassVar[bool] = True  # undone as soon as a container that continues may run
    stage: str = ""  # the stage in which it was made

    _kinds: ClassVar[dict[str, type["Effect"]]] = {}

    def __init_subclass__(cls, *, kind: str) -> None:
        cls.kind = kind
        cls._kinds[kind] = cls

    @abstractmethod
    def undo(self, journal: "Journal", patience: Patience) -> None:
        """Restore the earlier state of the node, or finish what cannot be undone.

        Args:
            journal: of the session; it forgets the effect afterwards.
            patience: how long to wait for what others must do first.

        Raises:
            OcihookError, OSError: if that is not possible yet; it is tried again.
        """

    def take_over(self, journal: "Journal") -> None:  # noqa: B027 - most need nothing
        """Continue the work that it needs all the time: the process that did so was killed."""

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return {"kind": self.kind, **to_json(self)}

    @classmethod
    def kinds(cls) -> Mapping[str, type["Effect"]]:
        """Return all kinds of effects that are loaded, by name."""
        return cls._kinds

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Effect":
        """Take what `to_json` made.

        Raises:
            OcihookError: if its kind is unknown.
            TypeError, ValueError: if it is malformed.
        """
        kind = cls._kinds.get(value["kind"])
        if kind is None:
            raise OcihookError(
                f"this release does not know how {value['kind']!r} is undone; another version of ocihook has done it"
            )
        return from_json(kind, {name: item for name, item in value.items() if name != "kind"})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found or measured: each field is one of the session's facts, and its name is unique among all facts."""
