"""Whatever states two containers are in: the comparison names each difference, and nothing else."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from ocihook.audit.comparing import compare, in_words
from ocihook.audit.rows import FILE, PROCESS, THREAD
from ocihook.audit.state import ContainerState, ProcessState, decode_state, encode_state
from ocihook.errors import IntegrityError
from ocihook.packs.frame import encode_frame

texts = st.one_of(st.sampled_from(["", "0", "0-3", "all", "ff", "own", "thread x"]), st.text(max_size=9)).filter(
    lambda text: not any("\ud800" <= character <= "\udfff" for character in text)
)
ids = st.integers(1, 9).map(str)
processes = st.builds(
    ProcessState,
    name=texts,
    own=st.dictionaries(st.sampled_from(sorted(PROCESS)), texts, max_size=6),
    threads=st.dictionaries(ids, st.dictionaries(st.sampled_from(sorted(THREAD)), texts, max_size=6), max_size=4),
    files=st.dictionaries(ids, st.dictionaries(st.sampled_from(sorted(FILE)), texts, max_size=6), max_size=4),
)
containers = st.builds(
    ContainerState,
    processes=st.dictionaries(ids, processes, max_size=4),
    left_out=st.lists(texts, max_size=2).map(tuple),
    cpus=st.sampled_from(["", "0-3", "2"]),
)


@given(containers)
def test_nothing_differs_from_itself(state: ContainerState) -> None:
    assert compare(state, state) == []


@given(containers)
def test_a_note_is_what_was_written(state: ContainerState) -> None:
    assert decode_state(encode_state(state)) == state


@given(containers, containers)
def test_each_difference_is_one_and_in_words(before: ContainerState, after: ContainerState) -> None:
    found = compare(before, after)
    for difference in found:
        had = before.processes[difference.process]
        assert not difference.thread or difference.thread in had.threads
        assert difference.before != difference.after
    lines = in_words(found)
    assert len(lines) == len({difference.row for difference in found})
    assert all(line.isprintable() for line in lines)
    missing = before.processes.keys() - after.processes.keys()
    assert {one.process for one in found if one.after == "missing" and not one.thread} == missing


@given(containers, st.data())
def test_a_changed_value_is_found(state: ContainerState, data: st.DataObject) -> None:
    with_threads = {pid: process for pid, process in state.processes.items() if process.threads}
    if not with_threads:
        return
    pid = data.draw(st.sampled_from(sorted(with_threads)))
    process = with_threads[pid]
    tid = data.draw(st.sampled_from(sorted(process.threads)))
    changed = {**process.threads[tid], "NoNewPrivs": "changed"}
    threads = {**process.threads, tid: {**process.threads[tid], "NoNewPrivs": "0"}}
    before = ContainerState(processes={**state.processes, pid: ProcessState(name="", own=process.own, threads=threads)})
    threads = {**process.threads, tid: changed}
    after = ContainerState(processes={**state.processes, pid: ProcessState(name="", own=process.own, threads=threads)})
    (found,) = compare(before, after)
    assert (found.process, found.thread, found.row.name) == (pid, tid, "NoNewPrivs")


@given(st.binary(max_size=300), st.booleans())
def test_whatever_a_note_has_it_is_read_or_refused(body: bytes, is_compressed: bool) -> None:  # noqa: FBT001 - drawn
    data = encode_frame("tasks", 1, zlib.compress(body) if is_compressed else body)
    try:
        decode_state(data)
    except IntegrityError:
        pass
    else:
        raise AssertionError("random bytes were read as a note")
