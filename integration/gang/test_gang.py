"""Two containers of one job, on two nodes, under traffic: dumped at one moment, and restored at other addresses."""

import json
import os
import shlex
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from integration.gang.nodes import LIMIT_S, assert_ended, attempt, limit_members, open_journals, serve_nodes
from integration.namespace import CommandError, wait_for
from integration.net.conftest import MakeNode
from integration.net.engine import NetPodman
from integration.net.pair import NAMES, Pair

IS_NIGHTLY = bool(os.environ.get("OCIHOOK_NIGHTLY"))
_KILL_ONE = "mkdir /run/one-killed 2>/dev/null && kill -9 $PPID"  # CRIU, of whoever comes first


def make_pair(node: NetPodman) -> Pair:
    limit_members(node)
    return Pair(node, gang="job", gang_size="2")


def gang(node: NetPodman, command: str, *arguments: str) -> str:
    """Run `ocihook gang` with the node's podman."""
    return node.ocihook("gang", command, *arguments, "--podman", shlex.join(["podman", *node.options()]))


def assert_nothing_left(node: NetPodman) -> None:
    assert_ended(node)
    assert node.holds("client") + node.holds("server") == []


def test_both_members_move_to_new_addresses(make_node: MakeNode) -> None:
    node = make_node()
    pair = make_pair(node)
    for number in range(1, 100 if IS_NIGHTLY else 3):
        if number == 2:  # from here on as on several nodes
            serve_nodes([node])
        directory = node.scratch / f"epoch{number}"
        assert "members client, server; 4 connections" in gang(node, "checkpoint", "job", str(directory))
        pair.remove()
        pair.remove_places()
        pair.make_places(number)
        assert "restored" in gang(node, "restore", str(directory))
        pair.assert_flows()
        assert_nothing_left(node)
    archives = sorted(map(str, (node.scratch / "epoch1").glob("*.tar")))
    assert "complete" in node.ocihook("gang", "verify", *archives)
    with pytest.raises(CommandError, match="lacks 1 members beside server"):
        node.ocihook("gang", "verify", archives[1])


def test_one_fails_and_all_run_on(make_node: MakeNode) -> None:
    node = make_node()
    pair = make_pair(node)
    limit_members(node, 1)
    with pytest.raises(CommandError, match=r"1 that never joined did not reach 'arrived' within 1 s"):
        node.checkpoint("client", pair.archives["client"])
    limit_members(node)
    with ThreadPoolExecutor() as pool:  # one whose CRIU is killed while it waits
        waiting = pool.submit(node.checkpoint, "client", pair.archives["client"])
        wait_for("the client to arrive", lambda: attempt(node)["state"] == "open")
        (journal,) = open_journals(node)
        os.kill(json.loads(journal.read_bytes())["criu"][0], signal.SIGKILL)
        with pytest.raises(CommandError):
            waiting.result(LIMIT_S)
    pair.assert_flows()
    for stage in ("network-lock", "post-dump"):
        node.act_at(stage, _KILL_ONE)
        with ThreadPoolExecutor() as pool:
            dumps = [pool.submit(node.checkpoint, name, pair.archives[name], "--leave-running") for name in NAMES]
            failures = [str(dump.exception()) for dump in dumps]
        if stage == "network-lock":
            assert any("is over for all members" in failure for failure in failures)
            assert "None" not in failures
        node.act_no_more()
        node.run("rmdir", "/run/one-killed")
        pair.assert_flows()
        assert_nothing_left(node)
    gang(node, "checkpoint", "job", str(node.scratch / "epoch"), "--leave-running")
    pair.assert_flows()
    assert_nothing_left(node)
