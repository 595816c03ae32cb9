"""An agent that packs until CRIU is gone: longer than any hook waits."""

import time

from ocihook.agent import server
from ocihook.ops import dump
from ocihook.ops.dump import while_criu_lives
from ocihook.ops.journal import Journal
from ocihook.store.packing import Progress


def until_it_is_gone(journal: Journal) -> Progress:
    check = while_criu_lives(journal)

    def wait_and_check(done: int) -> None:
        while journal.criu.is_alive():
            time.sleep(0.01)
        check(done)

    return wait_and_check


dump.while_criu_lives = until_it_is_gone
server.main()
