"""Mode `store`: CRIU's page images go to the node's store, and come back from it."""

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from ocihook.checkpoints.admission import check_domain
from ocihook.checkpoints.belongings import as_rewritten
from ocihook.checkpoints.complete import wait_complete
from ocihook.checkpoints.pending import is_here, keep_in_use
from ocihook.checkpoints.pulling import pull
from ocihook.checkpoints.rehydrate import (
    rehydrate_stored,
    stored_region_bytes,
    write_stored_parts,
    write_stored_regions,
)
from ocihook.checkpoints.stage import STAGED_NAME, Place, check_can_store, choose_place, finish_staging, stage
from ocihook.checkpoints.transfer import Moved
from ocihook.criu.images import check_page_images
from ocihook.errors import OcihookError, StoreError
from ocihook.images.compatibility import check_host, host_facts
from ocihook.images.image_set import (
    check_other_images,
    check_regions,
    dehydrate,
    discard_packs,
    is_read_twice,
    list_packable,
)
from ocihook.linux.files import identity, same_directory
from ocihook.linux.memory import resident_bytes
from ocihook.linux.patience import Patience
from ocihook.linux.workers import call_each
from ocihook.model import ContainerRef
from ocihook.session.effect import Effect
from ocihook.session.journal import Journal
from ocihook.session.participant import Dump, Participant, Restore, SizeFacts
from ocihook.stages.awaited_memory import await_memory
from ocihook.stages.detached import keep_no_longer
from ocihook.stages.page_images import Rehydrated
from ocihook.stages.stopped import is_stopped, save_belongings, want_store
from ocihook.store.domain import Domain
from ocihook.store.store import Store, store_workers
from ocihook.store.stored_manifest import StoredManifest
from ocihook.store.thin import Thin, read_thin

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Staging(Effect, kind="staging"):
    """A place in the store was made for what a dump brings. The thin record shows whether that was committed."""

    ends_with_stage: ClassVar[bool] = False  # a stage that starts over must know of it
    place: Place
    directory: Path  # the image directory
    identity: list[int]
    names: list[str] = field(default_factory=list)  # of page images that are taken out of it

    def undo(self, _journal: Journal, _patience: Patience) -> None:
        """Complete it, or undo it."""
        finish_staging(self.place, self.names, same_directory(self.directory, self.identity))


@dataclass
class StoredCheckpoint:
    """A checkpoint in the store."""

    domain: Domain
    manifest: StoredManifest

    @property
    def gpu(self) -> Mapping[str, Any]:
        """What the container had of GPUs."""
        return self.manifest.gpu

    @property
    def region_processes(self) -> Collection[str]:
        """The processes whose memory went past CRIU."""
        return {region.process for region in self.manifest.regions}

    @cached_property
    def region_bytes(self) -> int:
        """Bytes of that memory at least."""
        return stored_region_bytes(self.domain, self.manifest)

    @property
    def image_names(self) -> Collection[str]:
        """The page images that are in the store."""
        return [image.name for image in self.manifest.images]

    @property
    def write_parts(self) -> Callable[..., None]:
        """What writes parts of these into processes."""
        return partial(write_stored_parts, self.domain, self.manifest)

    @property
    def write_regions(self) -> Callable[..., int]:
        """What writes it into processes."""
        return partial(write_stored_regions, self.domain, self.manifest)


def begin(journal: Journal, container: ContainerRef, image_dir: Path, directory: Path, store: Store) -> Staging:
    """Make a place in the store for what a dump will bring.

    Args:
        journal: gets the effect that removes it.
        container: whose dump it is.
        image_dir: the image directory as others can find it later.
        directory: the same.
        store: where it goes.

    Raises:
        OcihookError: if the store cannot be used.
        OSError: from the file system.
    """
    earlier = journal.find(Staging)
    if earlier is not None:  # of a stage that was interrupted
        earlier.undo(journal, Patience())
        journal.forget(earlier)
    place = choose_place(container, store)
    effect = journal.add(Staging(place=place, directory=image_dir, identity=identity(directory)))
    place.pending.mkdir(mode=0o700)
    return effect


def _pull(restore: Restore, store: Store, thin: Thin) -> Moved:
    """Pull in a process of its own: nothing else ends an attempt at a remote that does not answer."""

    def fetch(checkpoint_id: str) -> Moved:
        return pull(store, thin.domain, checkpoint_id, restore.settings.remote, progress=restore.progress)

    (outcome,) = call_each(fetch, [thin.checkpoint_id], restore.patience)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class StoredPages(Participant):
    """Takes page images out of the engine's way at once; the work on them comes later."""

    def refuse(self, dump: Dump) -> None:
        """Go to the engine's archive, or refuse the dump as the policy wants it, if the store cannot take it."""
        further_bytes = want_store(dump) if is_stopped(dump) else 0
        call = dump.call()
        if call.policy.mode != "store":
            return
        try:
            check_can_store(dump.store, dump.container, resident_bytes(dump.init_pid) + further_bytes)
        except (OcihookError, OSError) as error:
            if call.policy.on_pack_error == "fail":
                raise
            inline = dataclasses.replace(call.policy, mode="inline")
            dump.journal.note(dataclasses.replace(call, policy=inline))
            dump.remark = dump.degrade(error, "The checkpoint goes into the engine's archive")

    def prepare(self, dump: Dump) -> None:
        """Make a place, if memory goes there before CRIU begins."""
        moves_gpu = dump.policy.gpu_memory == "packs" and dump.has_gpu
        if dump.policy.mode == "store" and (moves_gpu or dump.reads_memory):
            staging = begin(dump.journal, dump.container, Path(dump.image_dir), dump.directory, dump.store)
            dump.staged_at = dump.memory = staging.place.pending
            (dump.directory / STAGED_NAME).touch(mode=0o600)

    def after_images(self, dump: Dump) -> str:
        """Take the page images; or leave them in the engine's archive, if that fails and the policy allows it."""
        if dump.policy.mode != "store":
            return ""
        if not dump.awaited:
            keep_no_longer(dump.journal)
        effect = dump.journal.find(Staging)
        thin = read_thin(dump.directory)
        ours = {effect.place.pending.name if effect else "", dump.journal.facts(SizeFacts).checkpoint}
        if thin and thin.checkpoint_id in ours:  # the agent was killed after that
            if effect is not None:
                effect.undo(dump.journal, dump.patience)
                dump.journal.forget(effect)
            return f"container {dump.container}: its memory is on its way into the store as {thin.checkpoint_id}"
        try:
            with dump.journal.phase("stage") as phase:
                phase["bytes"] = self._stage(dump, effect)
        except (OcihookError, OSError) as error:
            dump.patience.check()
            is_half = bool(dump.awaited) or (dump.moved is not None and bool(dump.moved.packs))
            if is_half or dump.policy.on_pack_error == "fail":  # the archive would have only half of the memory
                raise
            effect = dump.journal.find(Staging)
            if effect is not None:
                effect.undo(dump.journal, dump.patience)
                dump.journal.forget(effect)
            return dump.degrade(error, "The checkpoint is in the engine's archive alone")
        sizes = dump.journal.facts(SizeFacts)
        if not sizes.checkpoint:
            return ""
        if dump.awaited:
            return f"container {dump.container}: its memory is read from a snapshot, for checkpoint {sizes.checkpoint}"
        return (
            f"container {dump.container}: {sizes.raw_bytes} bytes of memory are on their way into the store as "
            f"{sizes.checkpoint}"
        )

    def _stage(self, dump: Dump, effect: Staging | None) -> int:
        in_packs = dump.moved.images if dump.moved else ()
        check_page_images(dump.directory, {image.name: image.size_bytes for image in in_packs} | dict(dump.awaited))
        discard_packs(dump.directory)
        names = list_packable(dump.directory, in_packs)
        with_belongings = is_stopped(dump)
        if not (names or dump.awaited or dump.moved is not None or with_belongings):
            return 0
        effect = effect or begin(dump.journal, dump.container, Path(dump.image_dir), dump.directory, dump.store)
        effect.names = [*names, *(image.name for image in in_packs)]
        dump.journal.save()
        if with_belongings:
            save_belongings(dump, effect.place.pending, effect.names)
        call = dump.call()
        if dump.awaited:
            await_memory(dump, effect.place)
        job = stage(
            effect.place,
            names,
            dump.container,
            dump.directory,
            store=dump.store,
            host=host_facts(call.criu_version),
            durable=not call.leave_running,
            moved=dump.moved,
            with_belongings=with_belongings,
            is_pushed=call.policy.push == "always",
            awaits_memory=bool(dump.awaited),
        )
        dump.journal.note(SizeFacts(raw_bytes=None if dump.awaited else job.raw_bytes, checkpoint=job.id))
        dump.journal.forget(effect)
        return job.raw_bytes

    def check(self, restore: Restore) -> None:
        """Find the checkpoint in the store, or pull it there; wait until it is complete."""
        thin, settings = read_thin(restore.directory), restore.settings
        if thin is None:
            return
        check_domain(thin.domain, restore.journal.container, settings)
        store = Store.of(settings, restore.patience)
        keep_in_use(store, thin, is_pulled=bool(settings.remote))  # until this session ends
        if not is_here(store, thin):
            if not settings.remote:
                raise StoreError(
                    f"checkpoint {thin.checkpoint_id} of domain {thin.domain} is not in this node's store",
                    hint="configure the remote that it was pushed to, or fetch it by `ocihook store pull`",
                )
            with restore.journal.phase("pull") as phase:
                phase["bytes"] = _pull(restore, store, thin).moved_bytes
        domain = store.open(thin.domain)
        with restore.journal.phase("wait for the store"):
            manifest = wait_complete(
                domain,
                thin.checkpoint_id,
                workers=store_workers(settings),
                progress=restore.progress,
                settings=settings,
            )
        check_host(manifest.host, restore.call().criu_version)
        container, images = restore.journal.container, restore.directory
        check_other_images(
            images, as_rewritten(store.root, container.id if container else "", images, manifest.other_images)
        )
        check_regions(restore.directory, manifest.regions)
        restore.checkpoint = StoredCheckpoint(domain, manifest)

    def before_processes(self, restore: Restore) -> str:
        """Write page images for CRIU to read, all verified."""
        checkpoint = restore.checkpoint
        if not isinstance(checkpoint, StoredCheckpoint):
            return ""
        manifest = checkpoint.manifest
        names = [image.name for image in manifest.images]
        restore.journal.add(Rehydrated.of(restore, names))
        dehydrate(restore.directory, names)  # of an earlier attempt
        with restore.journal.phase("assemble") as phase:
            phase["bytes"] = manifest.image_bytes
            rehydrate_stored(
                checkpoint.domain,
                manifest,
                restore.directory,
                with_regions=is_read_twice(manifest.regions),
                only=restore.kept,
                workers=restore.call().workers,
                progress=restore.progress,
            )
        if not restore.cuts:
            check_page_images(restore.directory)
        restore.journal.note(SizeFacts(raw_bytes=manifest.raw_bytes, checkpoint=manifest.id))
        return f"container {manifest.container}: {manifest.raw_bytes} bytes of memory from checkpoint {manifest.id}"

    def recall(self, restore: Restore) -> None:
        """Find the checkpoint again."""
        thin = read_thin(restore.directory)
        if thin is not None:
            check_domain(thin.domain, restore.journal.container, restore.settings)
            store = Store.of(restore.settings, restore.patience)
            keep_in_use(store, thin, is_pulled=False)  # also where the agent was killed in between
            domain = store.open(thin.domain)
            restore.checkpoint = StoredCheckpoint(domain, domain.read(thin.checkpoint_id))
