"""Policies about connections: whatever is written is read or refused, and what they decide holds for every socket."""

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocihook.errors import ConfigError
from ocihook.net.policy import IN_WORDS, Fate, IPAddress, asked, fate, refused
from ocihook.tcp_policy import GANG, Mode, Rule, TcpPolicy, parse

OWN = (ip_address("10.0.0.5"), ip_address("fd00::5"))
PEER = ip_address("10.9.0.1")


class Sock(NamedTuple):
    local: IPAddress = OWN[0]
    remote: IPAddress = PEER
    remote_port: int = 5432
    is_connection: bool = True


ADDRESSES = st.one_of(
    st.sampled_from([*OWN, PEER, ip_address("127.0.0.1"), ip_address("::1"), ip_address("0.0.0.0"), ip_address("::")]),
    st.ip_addresses(v=4),
    st.ip_addresses(v=6),
)
SOCKETS = st.builds(Sock, ADDRESSES, ADDRESSES, st.integers(0, 65535), st.booleans())
PEERS = st.one_of(
    st.just(GANG),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.tuples(st.ip_addresses(v=6), st.integers(1, 65535)).map(lambda both: f"[{both[0]}]:{both[1]}"),
    st.tuples(st.ip_addresses(v=4), st.integers(1, 65535)).map(lambda both: f"{both[0]}:{both[1]}"),
    st.integers(1, 65535).map(lambda port: f":{port}"),
    st.sampled_from(["10.0.0.0/8", "fd00::/8", "[fd00::/8]:443", "0.0.0.0/0", "10.9.0.1/32:5432"]),
)
RULES = st.tuples(PEERS, st.sampled_from(["established", "close", "refuse"])).map("=".join)
POLICIES = st.tuples(st.lists(RULES, max_size=4), st.lists(st.sampled_from(list(Mode)), max_size=1)).map(
    lambda both: ", ".join([*both[0], *both[1]]) or "auto"
)


@given(POLICIES)
def test_what_is_meant_is_read(text: str) -> None:
    policy = parse(text, "x")
    assert len(policy.rules) == text.count("=")
    assert policy.mode == (text.rpartition(", ")[2] if "=" not in text.rpartition(", ")[2] else Mode.AUTO)


@given(st.one_of(st.text(max_size=60), st.text("abcdef.:/[]=,0123456789 gnclosrtuh", max_size=60)))
def test_anything_else_is_one_clear_error(text: str) -> None:
    try:
        parse(text, "annotation ocihook.io/tcp")
    except ConfigError as error:
        assert str(error).startswith("annotation ocihook.io/tcp: ")  # noqa: PT017 - it need not be one


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "''"),
        ("keep", "'keep'"),
        ("AUTO", "'AUTO'"),
        ("auto,close", "'auto' and 'close'"),
        ("auto,", "''"),
        ("10.0.0.0/8=auto", "'auto'"),
        ("10.0.0.0/8=", "''"),
        ("=close", "''"),
        ("10.0.0.1/8=close", "host bits"),
        ("10.0.0.0/33=close", "10.0.0.0/33"),
        ("10.0.0.256=close", "10.0.0.256"),
        (":0=close", "no such port"),
        (":65536=close", "no such port"),
        (":=close", "':'"),
        ("fd00::1:=close", "fd00::1:"),
        ("[fd00::1=close", "[fd00::1"),
        ("host.example=close", "host.example"),
        ("gang:5=close", "gang:5"),
        (",".join([":1=close"] * 65), "65 rules"),
    ],
)
def test_bad_policies(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=r"^config.toml: ") as caught:
        parse(text, "config.toml")
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (":5432=close", Rule(Mode.CLOSE, None, 5432)),
        ("gang=refuse", Rule(Mode.REFUSE, is_gang=True)),
        ("fd00::1=established", Rule(Mode.ESTABLISHED, *parse("[fd00::1]=close", "x").rules[0][1:])),
    ],
)
def test_rules(text: str, rule: Rule) -> None:
    assert parse(text, "x") == TcpPolicy(Mode.AUTO, (rule,))


@given(SOCKETS, POLICIES, st.frozensets(ADDRESSES, max_size=3))
def test_every_socket_has_a_fate(sock: Sock, text: str, gang: frozenset[IPAddress]) -> None:
    decided = fate(sock, parse(text, "x"), OWN, gang)
    assert IN_WORDS[decided]
    if not sock.is_connection:
        assert decided is (
            Fate.STAYS if sock.local.is_loopback or sock.local.is_unspecified else Fate.MOVES
        )  # nobody's policy is about it
    elif sock.remote.is_loopback:
        assert decided is Fate.STAYS
    elif sock.remote in OWN or sock.remote == sock.local:
        assert decided is Fate.MOVES
    elif decided is Fate.MOVES:
        assert sock.remote in gang
    assert (decided is Fate.REFUSED) == bool(refused([sock], parse(text, "x"), OWN)) or sock.remote in gang
    assert fate(sock, asked(parse(text, "x"), ["tcp-established"]), OWN, gang) is not Fate.REFUSED


@pytest.mark.parametrize(
    ("text", "stranger", "member"),
    [
        ("auto", Fate.CLOSED, Fate.MOVES),
        ("established", Fate.KEPT_IF_SAME, Fate.MOVES),
        ("close", Fate.CLOSED, Fate.CLOSED),
        ("refuse", Fate.REFUSED, Fate.REFUSED),
        ("gang=established,refuse", Fate.REFUSED, Fate.MOVES),
        ("gang=close,established", Fate.KEPT_IF_SAME, Fate.CLOSED),
        (":5432=established", Fate.KEPT_IF_SAME, Fate.MOVES),
        (":5433=established", Fate.CLOSED, Fate.MOVES),
        ("10.9.0.0/16:5432=refuse,10.0.0.0/8=established", Fate.REFUSED, Fate.REFUSED),
        ("10.9.0.2=refuse,10.0.0.0/8=established,refuse", Fate.KEPT_IF_SAME, Fate.MOVES),
        ("0.0.0.0/0=established", Fate.KEPT_IF_SAME, Fate.MOVES),
        ("::/0=established", Fate.CLOSED, Fate.MOVES),
    ],
)
def test_the_first_rule_that_fits_decides(text: str, stranger: Fate, member: Fate) -> None:
    assert fate(Sock(), parse(text, "x"), OWN) is stranger
    assert fate(Sock(), parse(text, "x"), OWN, {PEER}) is member


def test_a_mapped_address_is_the_ipv4_address_that_it_stands_for() -> None:
    """Sockets give it so (netlink.py, socket_images.py)."""
    assert isinstance(IPv6Address("::ffff:10.9.0.1").ipv4_mapped, IPv4Address)
    assert fate(Sock(), parse("10.9.0.1=established", "x"), OWN) is Fate.KEPT_IF_SAME
