"""Logging of agent and command line: stderr, or a file where a detached agent has no stderr."""

import logging
import os
from pathlib import Path

# sd-daemon(3): a level prefix that the journal understands
_SYSTEMD_FORMAT = {10: "<7>", 20: "<6>", 30: "<4>", 40: "<3>", 50: "<2>"}


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if "JOURNAL_STREAM" in os.environ:
            return _SYSTEMD_FORMAT.get(record.levelno, "<6>") + text
        return f"{self.formatTime(record)} {record.levelname.lower()} [{record.process}] {text}"


def set_up_logging(level: int, file: Path | None = None) -> None:
    """Send all records to stderr, or to `file`."""
    handler = logging.StreamHandler() if file is None else logging.FileHandler(file, delay=True)
    handler.setFormatter(_Formatter("%(message)s"))
    logging.basicConfig(level=level, handlers=[handler], force=True)
