"""Stands in for CRIU where only its calls of the action script matter: its environment, descriptors and stages.

    criu.py ACTION_SCRIPT IMAGE_DIR INIT_PID STAGE...

Prints `STAGE STATUS` and what the script printed. As CRIU <= 4.1.1 does, it runs the script twice a stage. The stage
`pages?` prints whether page images are there, `wait` waits to be killed, `until=FILE` waits for a file, `log=FILE`
writes that as its log.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

script, image_dir, init_pid, *stages = sys.argv[1:]
directory = os.open(image_dir, os.O_RDONLY | os.O_DIRECTORY)
log = (Path(image_dir).parent / "dump.log").open("a")

for stage in stages:
    if stage == "wait":
        print("waiting", flush=True)
        time.sleep(600)
    elif stage.startswith("until="):
        print("waiting", flush=True)
        while not Path(stage.removeprefix("until=")).exists():
            time.sleep(0.01)
    elif stage.startswith("log="):
        log.write(Path(stage.removeprefix("log=")).read_text())
        log.flush()
    elif stage == "pages?":
        print("pages", sorted(name for name in os.listdir(image_dir) if name.startswith("pages-")), flush=True)
    else:
        environment = {"CRTOOLS_SCRIPT_ACTION": stage, "CRTOOLS_IMAGE_DIR": f"/proc/{os.getpid()}/fd/{directory}"}
        if stage != "pre-restore":
            environment["CRTOOLS_INIT_PID"] = init_pid
        status, output = 0, ""
        for _ in range(2):
            done = subprocess.run(
                [script],
                env={"PATH": os.environ["PATH"], **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=60,
                check=False,
                preexec_fn=lambda: os.close(0),
            )
            status |= done.returncode
            output = done.stdout.strip()
        print(stage, status, output, flush=True)
        if status and stage in ("pre-dump", "post-dump", "pre-restore"):
            break
