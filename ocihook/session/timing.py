"""Measures what forked workers do, where they do it: which process's lock, copy or unlock took how long.

All workers of a phase share one open file in memory, to which each span is appended whole; the parent reads it when
they are done. So nothing waits for a measurement, and a worker that is killed only leaves none.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from ocihook.linux.memory import ProcessMemory
from ocihook.linux.procfs import Process


class Spans:
    """Spans of one phase."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("ocihook-spans", os.MFD_CLOEXEC)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_APPEND)

    @contextlib.contextmanager
    def measure(self, name: str, process: Process) -> Iterator[dict[str, Any]]:
        """Measure what is done for a process, also if it fails; the caller may add `bytes`."""
        began, started = time.time(), time.monotonic()
        span: dict[str, Any] = {"name": name, "pid": process.pid, "bytes": 0}
        try:
            yield span
        except BaseException:
            span["failed"] = True
            raise
        finally:
            self.add(span | {"began": began, "seconds": time.monotonic() - started})

    def add(self, span: dict[str, Any]) -> None:
        """Add a span that was measured elsewhere."""
        os.write(self._fd, json.dumps(span | {"worker": os.getpid()}).encode() + b"\n")

    def collect(self) -> list[dict[str, Any]]:
        """Return all spans in the order of their starts; those of one worker for one process are joined."""
        joined: dict[tuple[str, int, int], dict[str, Any]] = {}
        workers: dict[int, int] = {}
        text = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        for span in sorted(map(json.loads, text.splitlines()), key=lambda span: span["began"]):
            span["worker"] = workers.setdefault(span["worker"], len(workers))
            key = span["name"], span["pid"], span["worker"]
            first = joined.setdefault(key, span)
            if first is not span:
                first["seconds"] = max(first["seconds"], span["began"] + span["seconds"] - first["began"])
                first["bytes"] += span["bytes"]
        return list(joined.values())

    def close(self) -> None:
        """Discard the spans."""
        os.close(self._fd)


def measured(spans: Spans | None, name: str, process: Process) -> AbstractContextManager[dict[str, Any]]:
    """Measure if there are spans to add to."""
    return spans.measure(name, process) if spans else nullcontext({})


def opener(spans: Spans | None, process: Process) -> Callable[[], ProcessMemory]:
    """Return a function that opens a process's memory; with spans, the copying is measured as one called move."""
    return partial(MeasuredMemory, spans, "move", process) if spans else partial(ProcessMemory, process)


class MeasuredMemory(ProcessMemory):
    """A process's memory that records how long it was open and what went through."""

    def __init__(self, spans: Spans, name: str, process: Process) -> None:
        super().__init__(process)
        self._spans, self._name = spans, name
        self._began, self._started = time.time(), time.monotonic()
        self._bytes = 0

    def read_into(self, view: memoryview, address: int) -> int:
        """Fill `view` from an address; return how many bytes there were."""
        done = super().read_into(view, address)
        self._bytes += done
        return done

    def read_shared_into(self, view: memoryview, address: int) -> int:
        """Do the same where pages are to stay shared."""
        done = super().read_shared_into(view, address)
        self._bytes += done
        return done

    def write(self, buffers: Sequence[bytes | memoryview], address: int) -> int:
        """Write buffers from an address on; return how many bytes went."""
        done = super().write(buffers, address)
        self._bytes += done
        return done

    def close(self) -> None:
        """Record what was written."""
        seconds = time.monotonic() - self._started
        self._spans.add(
            {"name": self._name, "pid": self._pid, "began": self._began, "seconds": seconds, "bytes": self._bytes}
        )
