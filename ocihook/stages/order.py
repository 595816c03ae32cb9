"""Who takes part in a dump and a restore, the outermost first. Whoever is new has a line here."""

from ocihook.audit.participant import Audit
from ocihook.gang.participant import Membership
from ocihook.gpu.participant import Gpu
from ocihook.memory.clean_pages import MergedPages, ReadPages
from ocihook.memory.earlier_dumps import EarlierDumps
from ocihook.memory.host_memory import HostMemory
from ocihook.memory.pre_copy import PreCopy
from ocihook.memory.standstill import Standstill
from ocihook.net.participant import Network
from ocihook.preflight.participant import Preflight
from ocihook.session.participant import Participant
from ocihook.stages.awaited_memory import ChosenSnapshot, EarlierSnapshot
from ocihook.stages.noted_origin import NotedOrigin
from ocihook.stages.one_at_a_time import OneAtATime
from ocihook.stages.page_images import PageImages
from ocihook.stages.quiesce import Quiesce
from ocihook.stages.stored_pages import StoredPages
from ocihook.stages.until_started import UntilStarted

_ORDER: tuple[type[Participant], ...] = (
    UntilStarted,  # freezes what is restored, and not started yet
    OneAtATime,  # a second dump of the container does not begin
    Membership,  # the other containers of the job come to the same moment, or none does
    EarlierDumps,  # an engine's own dumps build on each other only where no page can be missing
    ReadPages,  # most host memory is read, once all stand still and CRIU is about to begin
    Standstill,  # thaws what the engine has frozen, so that the others can work; freezes it again
    EarlierSnapshot,  # processes that are copied for an earlier dump are their own again
    PreCopy,  # memory is read that need not be read again once all stand still
    Quiesce,  # the application quiesces itself
    Preflight,  # what CRIU would refuse, or could not restore, is refused before anything else is touched
    StoredPages,  # CRIU's page images go to the node's store
    PageImages,  # or become packs in the engine's archive
    Network,  # no packet moves any more; sockets move to where the container is restored
    HostMemory,  # and most of the memory in them goes into restored processes past CRIU
    MergedPages,  # what was read joins what CRIU has written, before all that is packed or stored
    Gpu,  # GPU memory goes into packs, or into the processes' own
    ChosenSnapshot,  # or stays there, where all memory is read later
    NotedOrigin,  # first once there are images: it is one of those that are packed or stored
    Audit,  # likewise: how each task was, while all of them are stopped; and how it is before any runs again
)


def participants() -> list[Participant]:
    """Return them, for one stage."""
    return [kind() for kind in _ORDER]
