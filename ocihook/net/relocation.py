"""Moves a checkpoint to addresses that are known beforehand, in its images: needs nothing of CRIU's memory later.

For tools, for a CRIU of unknown make, and for nodes on which nobody may write into another process's memory.
"""

import dataclasses
from collections.abc import Mapping
from ipaddress import ip_interface
from pathlib import Path

from ocihook.criu.socket_images import FILES_NAME, FilesImage, move_files
from ocihook.errors import ArchiveKindError, ImageError, UnsupportedError
from ocihook.images.image_set import read_packed
from ocihook.net.addresses import AddressMap
from ocihook.net.moving import Plan, make_plan
from ocihook.net.note import NETWORK_NAME, NetworkNote, read_note, write_note
from ocihook.net.policy import IPAddress, TcpPolicy
from ocihook.packs.packed_manifest import MANIFEST_NAME, OtherImage, digest_file, write_manifest
from ocihook.store.thin import read_thin

CHANGED = (FILES_NAME, NETWORK_NAME, MANIFEST_NAME)  # what is rewritten, where it exists


def relocate(directory: Path, pairs: Mapping[IPAddress, IPAddress], *, close_others: bool) -> Plan:
    """Rewrite the images of a checkpoint that have addresses; return what has become of its sockets.

    Args:
        directory: the image set, without its packs if they are elsewhere.
        pairs: new addresses by old ones, of the container itself and of those that it stays connected to.
        close_others: whether connections to all others end; else they stay connected.

    Raises:
        ImageError: if there are no sockets, or none has any of the old addresses; nothing was changed.
        UnsupportedError: naming what cannot be; nothing was changed.
        OcihookError: if an image is damaged.
    """
    if read_thin(directory) is not None:
        raise ArchiveKindError(
            "its memory is in a store, which says what its images are", hint="use `archive pack` first"
        )
    manifest, note = read_packed(directory), read_note(directory)
    image = FilesImage.read(directory)
    own = note.own if note else frozenset(sock.local for sock in image.sockets)
    known = own | {sock.remote for sock in image.sockets}
    if unknown := [str(old) for old in pairs if old not in known]:
        had = ", ".join(
            sorted(str(address) for address in known if not (address.is_loopback or address.is_unspecified))
        )
        raise ImageError(f"no socket and no interface has {', '.join(unknown)}", hint=f"there are {had or 'none'}")
    gang = pairs.keys() if close_others else known
    addresses = AddressMap({address: pairs.get(address, address) for address in own}).with_peers(pairs)
    plan = make_plan(image.sockets, TcpPolicy(), addresses, own=own, gang=gang)
    if plan.to_destroy and note is None:
        raise UnsupportedError(
            f"{plan.to_destroy[0].sock} ends only where it is restored by ocihook, which did not dump it",
            hint="leave out --close-others: in a restore ocihook ends what its policy does not keep",
        )
    move_files(directory, image, {move.sock.id: move.ends for move in plan.moves})
    if note is not None:
        ended = (*note.ended, *(move.sock.id for move in plan.to_destroy))
        write_note(directory, dataclasses.replace(_moved(note, pairs), ended=ended))
    if manifest is not None:
        images = tuple(_again(directory, one) if one.name in CHANGED else one for one in manifest.other_images)
        write_manifest(directory, dataclasses.replace(manifest, other_images=images), durable=True)
    return plan


def _moved(note: NetworkNote, pairs: Mapping[IPAddress, IPAddress]) -> NetworkNote:
    """Return a note as if the container had had the new addresses when it was dumped."""

    def moved(text: str) -> str:
        interface = ip_interface(text)
        return f"{pairs.get(interface.ip, interface.ip)}/{interface.network.prefixlen}"

    links = tuple(link._replace(addresses=tuple(map(moved, link.addresses))) for link in note.links)
    of_link = {name: tuple(map(moved, texts)) for name, texts in note.of_link.items()}
    return dataclasses.replace(note, links=links, of_link=of_link)


def _again(directory: Path, image: OtherImage) -> OtherImage:
    path = directory / image.name
    return OtherImage(image.name, path.stat().st_size, digest_file(path))
