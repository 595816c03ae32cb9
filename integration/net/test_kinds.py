"""A container with a socket of each kind: what each is at the same address, at another, and under each policy."""

import json
import re

from integration.journals import last_session, sessions
from integration.net.conftest import MakeNode
from integration.net.engine import NetPodman, Place
from ocihook.net.policy import IN_WORDS, Fate

HERE, THERE, STRANGER = Place.of(1, 1), Place.of(2, 1), Place.of(9, 9)

# What each kind gives when it is used; OWN stands for the container's addresses. A connection that has ended has the
# addresses of the loopback device.
_KEPT = {
    "established": r"name=OWN/\d+ peer=STRANGER/9000 send=5 recv=5 again=1",
    "established6": r"name=OWN/\d+ peer=STRANGER/9000 send=5 recv=5 again=1",
    "mapped": r"name=::ffff:OWN/\d+ peer=::ffff:STRANGER/9000 send=5 recv=5 again=1",
    "bound-device": r"name=OWN/\d+ peer=STRANGER/9000 send=5 recv=5 again=1",
    "close-wait": r"name=OWN/\d+ peer=STRANGER/9001 send=5 recv=0 again=EPIPE",
    "fin-wait1": r"name=OWN/\d+ recv=nothing state=4",
    "fin-wait2": r"name=OWN/\d+ recv=nothing state=5",
    "syn-sent": r"state=2 error=0",
    "receive-queue": r"received=200000 then=0",
    "send-queue": r"unsent=1 send=\S+",
    "options": r"user_timeout=30000 notsent_lowat=65536 congestion=reno nodelay=1",
    "segments": r"same=1",
    "segments6": r"same=1",
}
_CLOSED = {
    "established": r"\S+ \S+ send=ECONNRESET recv=0 again=EPIPE",
    "established6": r"\S+ \S+ send=ECONNRESET recv=0 again=EPIPE",
    "mapped": r"\S+ \S+ send=ECONNRESET recv=0 again=EPIPE",
    "bound-device": r"\S+ \S+ send=ECONNABORTED recv=0 again=EPIPE",
    "close-wait": r"\S+ \S+ send=ECONNABORTED recv=0 again=EPIPE",
    "fin-wait1": r"\S+ recv=ECONNABORTED state=7",
    "fin-wait2": r"\S+ recv=ECONNABORTED state=7",
    "syn-sent": r"state=7 error=ECONNABORTED",
    "receive-queue": r"received=1\d{5} then=ECONNRESET",
    "send-queue": r"\S+ send=ECONNRESET",
    "options": r".* nodelay=1",
    "segments": r"same=\d",
    "segments6": r"same=\d",
}
_ALWAYS = {
    "listen": r"name=OWN/9100 listens=1 waits=0",
    "listen6": r"name=OWN/9100 listens=1 waits=0",
    "listen-any": r"name=0.0.0.0/9101 listens=1 waits=0",
    "listen-device": r"name=OWN/9105 listens=1 waits=0",
    "accept-queue": r"name=OWN/9106 listens=1 waits=0",  # who waits there is lost
    "loopback": r"name=127.0.0.1/\d+ send=5 recv=5 back=2 recv=2",
    "own-address": r"name=OWN/\d+ send=5 recv=5 back=2 recv=2",
    "time-wait": r"",
    "bound": r"name=OWN/9104",
    "unbound": r"name=0.0.0.0/0",
    "udp": r"name=OWN/9100 queued=nothing send=5 recv=5",
    "udp-connected": r"name=OWN/\d+ queued=nothing send=5 recv=5",
    "udp-queue": r"name=OWN/9101 queued=nothing send=5 recv=5",  # so is what was in a queue of datagrams
    "unix-pair": r"name=- send=5 recv=5 back=2 recv=2",
    "netlink": r"send=20 recv=1",
    "netlink-groups": r"",
    "raw-icmp": r"name=0.0.0.0/1",
    "raw-tcp": r"name=0.0.0.0/6",
    "raw-udp": r"name=0.0.0.0/17",
    "raw-multipath": r"name=0.0.0.0/262",
    "packet": r"",
    "multicast": r"name=0.0.0.0/9102 member=1",
}


def restored(node: NetPodman, place: Place, policy: str) -> dict[str, str]:
    """Restore in a node that is recreated; return what the sockets give."""
    node.remove_place("kinds")
    node.remove("kinds")
    node.make_place("kinds", place)
    node.configure_policy(tcp=policy)
    node.restore(node.scratch / "kinds.tar")
    assert all(session["effects"] == [] for session in sessions(node.namespace))
    return node.use_kinds("kinds")


def fates(node: NetPodman) -> list[str]:
    """Return what `archive inspect` says of each connection with the stranger."""
    sockets = json.loads(node.ocihook("archive", "inspect", "--json", str(node.scratch / "kinds.tar")))["sockets"]
    ends = f"-> {STRANGER.four}:", f"-> [{STRANGER.six}]:"
    return [
        one["fate"] for one in sockets if one["socket"].startswith("TCP ") and any(e in one["socket"] for e in ends)
    ]


def ended(node: NetPodman) -> int:
    """Return how many connections the last restore has ended."""
    message = last_session(node.namespace, "pre-restore")["stages"]["pre-restore"]["message"]
    found = re.search(r"(\d+) connections end", message)
    return int(found[1]) if found else 0


def refused(node: NetPodman) -> str:
    """Try to checkpoint; check that it is refused; return why."""
    node.checkpoint("kinds", node.scratch / "kinds.tar", check=False)
    session = last_session(node.namespace, "pre-dump")
    assert session["effects"] == []
    assert node.is_running("kinds")
    assert node.holds("kinds") == []
    return str(session["stages"]["pre-dump"]["message"])


def assert_gave(found: dict[str, str], expected: dict[str, str], place: Place) -> None:
    own, other = (f"(?:{re.escape(some.four)}|{re.escape(some.six)})" for some in (place, STRANGER))
    patterns = {kind: text.replace("OWN", own).replace("STRANGER", other) for kind, text in expected.items()}
    wrong = {kind: gave for kind, gave in found.items() if not re.fullmatch(patterns[kind], gave.strip())}
    assert not wrong
    assert found.keys() == expected.keys()


def assert_doctor_says(node: NetPodman, fate: Fate) -> None:
    """Check what doctor says of connections: of those to a stranger and to itself, a few of a kind."""
    container_id = node("inspect", "--format", "{{.Id}}", "kinds").strip()
    answer = json.loads(node.ocihook("doctor", "--json", "--container", container_id, check=False))
    details = [finding["detail"] for finding in answer["findings"] if finding["check"] == "connection"]
    strangers = [detail for detail in details if f" -> {STRANGER.four}:" in detail]
    assert strangers
    assert all(IN_WORDS[fate] in detail for detail in strangers)
    for own in (Fate.STAYS, Fate.MOVES):
        assert any(IN_WORDS[own] in detail for detail in details)


def test_every_kind_under_every_policy(make_node: MakeNode) -> None:
    node = make_node()
    node.make_place("stranger", STRANGER)
    node.make_place("kinds", HERE)
    node.spawn_peer("stranger", "stranger", STRANGER.four, STRANGER.six)
    own, other = HERE, STRANGER
    words = ("kinds", own.four, other.four, own.six, other.six)
    node.start_peer("kinds", "kinds", *words, options=["--cap-add=NET_RAW"])
    archive = node.scratch / "kinds.tar"

    for policy, message in (
        ("keep", "'keep' says nothing about connections"),
        ("refuse", "refuses a dump with its"),
        ("established,10.77.9.0/24:9001=refuse", "refuses a dump with its 1 open connections"),
    ):
        node.configure_policy(tcp=policy)
        assert message in refused(node)

    for policy, fate in (("auto", Fate.CLOSED), ("established", Fate.KEPT_IF_SAME)):
        node.configure_policy(tcp=policy)
        assert_doctor_says(node, fate)
    node.checkpoint("kinds", archive)
    said = fates(node)
    assert len(said) >= len(_CLOSED)
    assert set(said) == {"kept-if-same"}
    assert_gave(restored(node, HERE, "established"), _ALWAYS | _KEPT, HERE)
    assert ended(node) == 0
    assert_gave(restored(node, THERE, "established"), _ALWAYS | _CLOSED, THERE)
    assert ended(node) == len(said)
    node.configure_policy(tcp="auto")
    assert fates(node) == ["closed"] * len(said)
    assert_gave(restored(node, HERE, "auto"), _ALWAYS | _CLOSED, HERE)
    assert ended(node) == len(said)

    addresses = [f"--address={old}={new}" for old, new in zip(HERE, THERE, strict=True)]
    node.ocihook("archive", "move", "--close-others", *addresses, str(archive), str(archive.with_name("moved.tar")))
    archive.with_name("moved.tar").replace(archive)
    assert_gave(restored(node, THERE, "established"), _ALWAYS | _CLOSED, THERE)


def test_close_and_rules_of_an_annotation_and_an_address_of_the_link(make_node: MakeNode) -> None:
    """Of a container that listens at a link-local address of IPv4, and is restored at another such."""
    node = make_node()
    node.make_place("stranger", STRANGER)
    node.spawn_peer("stranger", "stranger", STRANGER.four, STRANGER.six)

    def make_place(of_link: str) -> None:
        node.make_place("kinds", HERE)
        node.inside("kinds", "ip", "addr", "add", f"{of_link}/16", "dev", "eth0", "scope", "link")
        node.inside("kinds", "sh", "-c", "echo 0 0 > /proc/sys/net/ipv4/ping_group_range")

    make_place("169.254.1.1")
    kinds = ("listen", "established", "established6", "receive-queue", "ping")
    words = ("kinds", "169.254.1.1", STRANGER.four, HERE.six, STRANGER.six, *kinds)
    node.start_peer("kinds", "kinds", *words, tcp=f"close,{STRANGER.four}:9000=established")
    # Whoever is in this map counts as a member of the gang, whom `close` does not spare.
    node.configure_policy(address_map=f"{STRANGER.six}={STRANGER.six}")
    archive = node.scratch / "kinds.tar"
    node.checkpoint("kinds", archive)
    assert sorted(fates(node)) == ["closed", "closed", "kept-if-same"]
    node.remove_place("kinds")
    node.remove("kinds")
    make_place("169.254.2.2")
    node.restore(archive)
    assert ended(node) == 2
    found = node.use_kinds("kinds")
    assert found.pop("listen").strip() == "name=169.254.2.2/9100 listens=1 waits=0"
    assert found.pop("ping").strip() == "send=8 recv=8"
    expected = {"established": _KEPT, "established6": _CLOSED, "receive-queue": _CLOSED}
    assert_gave(found, {kind: gives[kind] for kind, gives in expected.items()}, HERE)


def test_urgent_data_is_refused_by_name(make_node: MakeNode) -> None:
    """CRIU stops reading at an urgent byte: it fails, or has the connection go on without what follows."""
    node = make_node()
    node.make_place("stranger", STRANGER)
    node.make_place("kinds", HERE)
    node.spawn_peer("stranger", "stranger", STRANGER.four, STRANGER.six)
    for kind, message in (("urgent", "a restore loses it, and the data behind it"), ("urgent-inline", "cannot dump")):
        node.start_peer("kinds", "kinds", "kinds", HERE.four, STRANGER.four, HERE.six, STRANGER.six, kind)
        node.configure_policy(tcp="established")
        assert message in refused(node)
        assert "received=20" in node.use_kinds("kinds")[kind]
        node.remove("kinds")


def test_mptcp_is_refused_by_name(make_node: MakeNode) -> None:
    node = make_node()
    node.make_place("kinds", HERE)
    node.start_peer("kinds", "kinds", "kinds", HERE.four, HERE.four, HERE.six, HERE.six, "mptcp")
    assert "uses multipath TCP, which CRIU cannot dump" in refused(node)
