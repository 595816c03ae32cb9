"""What CRIU refuses in its configuration files is found as CRIU finds it."""

import pytest

from ocihook.criu import options
from ocihook.criu.options import Known, Script, faults, scripts


@pytest.mark.parametrize(
    ("line", "what", "remedy"),
    [  # as `criu check --config` of CRIU 4.1.1 takes them, or not
        ("", "", ""),
        ("# tcp-closed", "", ""),
        ("  tcp-close", "", ""),
        ("tcp-close # why", "", ""),
        ("tcp-estab", "", ""),
        ("ghost-limi 5M", "", ""),
        ("no-tcp-close", "", ""),
        ("manage-cgroups=ignore", "", ""),
        ("verbosity", "", ""),
        ('lsm-profile "selinux:a b"', "", ""),
        ("tcp-closed", "CRIU has no option `tcp-closed`", "did you mean tcp-close?"),
        ("tcp-close#why", "CRIU has no option `tcp-close#why`", "did you mean tcp-close?"),
        ("no-ghost-limit", "CRIU has no option `no-ghost-limit`", "did you mean"),
        ("xyz", "CRIU has no option `xyz`", "remove it"),
        ("--tcp-close", "has dashes", "write tcp-close"),
        ("-R", "has dashes", "write R"),
        ("tcp-close\r", "carriage return", "line ends of Unix"),
        ("tcp-close=yes", "takes no value", "no-tcp-close"),
        ("ghost-limit", "needs a value", "ghost-limit VALUE"),
        ("ghost-limit # none", "needs a value", "ghost-limit VALUE"),
        ("tls-c", "may be tls-cacert, tls-cacrl, tls-cert", "write the whole name"),
    ],
)
def test_a_line(line: str, what: str, remedy: str) -> None:
    found = list(faults(f"file-locks\n{line}\n".encode(), Known()))
    assert [fault.line for fault in found] == [2] * bool(what)
    assert all(what in fault.what and remedy in fault.remedy for fault in found)


def test_an_older_and_a_later_criu() -> None:
    content = b"allow-uprobes\nno-brand-new\n"
    older = Known("4.1.1", b"\x7fELF\0no-tcp-close\0", "  --tcp-close  ...")
    assert [fault.what for fault in faults(content, older)] == [
        "CRIU 4.1.1 has no option `allow-uprobes`",
        "CRIU has no option `no-brand-new`",
    ]
    later = Known("9", b"\0no-allow-uprobes\0", "  -B|--brand-new   new\n")
    assert list(faults(content, later)) == []
    assert list(faults(b"tcp-close\n", older)) == []  # a linker lets both names share their end


def test_scripts_with_their_lines() -> None:
    content = b'# action-script /no\naction-script /a # why\nfile-locks\naction-script="x"\n\taction-script "/b c"\n'
    assert list(scripts(content)) == [Script(2, "/a"), Script(4, '"x"'), Script(5, "/b c")]


@pytest.mark.parametrize("name", sorted(options._ALL))
def test_every_option_is_one_line_of_ours_or_needs_a_value(name: str) -> None:
    line = f"{name} x" if name in options._WITH_VALUE else name
    assert list(faults(line.encode(), Known())) == []
