"""Our block in a CRIU configuration file: put in and taken out again, every foreign byte is where it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocihook.criu.conf import Block, Option, action_scripts, add_block, options, read_block, remove_block
from ocihook.errors import ConfigError

LINES = st.sampled_from(
    [
        b"tcp-established",
        b"# comment",
        b"",
        b"\r",
        b"ghost-limit 10M",
        b"action-script /usr/bin/other",
        b"\0\xff",
        b"# END",
    ]
)
CONTENT = st.one_of(
    st.binary(max_size=200),
    st.lists(LINES, max_size=8).map(b"\n".join),
    st.lists(LINES).map(lambda x: b"\n".join(x) + b"\n"),
).filter(lambda content: b"ocihook" not in content)
BLOCKS = st.builds(
    Block,
    st.sampled_from(["/usr/local/libexec/ocihook/criu-action", "/opt/a b/criu-action", ""]),
    made_file=st.booleans(),
    plugin_dir=st.sampled_from(["", "/usr/local/libexec/ocihook"]),
    others=st.sampled_from([(), ("tcp-established", "skip-in-flight"), ("network-lock nftables",)]),
)


@given(CONTENT, BLOCKS, BLOCKS)
def test_adding_and_removing_leaves_every_byte(content: bytes, block: Block, newer: Block) -> None:
    added = add_block(content, block, where="x")
    assert read_block(added, where="x") == block
    assert added.endswith(content)
    assert add_block(added, block, where="x") == added
    assert add_block(added, newer, where="x") == add_block(content, newer, where="x")
    assert remove_block(added, where="x") == content
    assert remove_block(content, where="x") == content


@given(CONTENT, CONTENT, BLOCKS)
def test_a_block_that_somebody_moved_is_found(before: bytes, after: bytes, block: Block) -> None:
    if before and not before.endswith(b"\n"):
        before += b"\n"
    moved = before + add_block(after, block, where="x")
    assert read_block(moved, where="x") == block
    assert remove_block(moved, where="x") == before + after


@pytest.mark.parametrize(
    "content",
    [
        b"# BEGIN ocihook\naction-script /x\n",
        b"one\n# END ocihook\n",
        b"# BEGIN ocihook\n# END ocihook\n# BEGIN ocihook\n# END ocihook\n",
        b"# END ocihook\n# BEGIN ocihook\n",
        b"# BEGIN ocihook\n# END ocihook",
    ],
)
def test_a_damaged_block_is_an_error_that_names_file_and_line(content: bytes) -> None:
    line = 2 if content.startswith(b"one") else 1
    with pytest.raises(ConfigError, match=rf"/etc/criu/runc.conf, line {line}: ocihook's block is damaged"):
        remove_block(content, where="/etc/criu/runc.conf")


def test_options_are_read_as_criu_does() -> None:
    content = b'# note\n--tcp-established\nghost-limit 10M # why\nmanage-cgroups=ignore\naction-script "/a b/c"\n\n=\n'
    assert options(content) == [
        Option("tcp-established", ""),
        Option("ghost-limit", "10M"),
        Option("manage-cgroups", "ignore", is_joined=True),
        Option("action-script", "/a b/c"),
    ]
    assert action_scripts(content) == ["/a b/c"]
    # Only a newline ends a line; a form feed or U+2028 is part of one.
    assert options("one two\x0cthree\u2028four".encode()) == [Option("one", "two\x0cthree\u2028four")]
