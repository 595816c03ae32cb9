"""`crictl` on a node whose Debian has none: its commands, by the engine's real CRI, with its output.

The node has a script that passes on what it is called with; the calls are made by the test's own process, which has
gRPC. Output is as crictl 1.31 prints it: a status with the engine's own `info`, whose parts that are JSON are inserted.
"""

import json
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf import json_format

from integration.cri.engine import RUNNING, CriEngine

_SOCKET = "crictl.sock"
_SCRIPT = f"""#!/usr/bin/python3
import json, socket, sys
from pathlib import Path
files = {{word: Path(word).read_text() for word in sys.argv[1:] if word.endswith(".json")}}
asked = socket.socket(socket.AF_UNIX)
asked.connect("/scratch/{_SOCKET}")
with asked.makefile("rw") as stream:
    stream.write(json.dumps([sys.argv[1:], files]) + "\\n")
    stream.flush()
    status, said = json.loads(stream.readline())
print(said, file=sys.stderr if status else sys.stdout)
sys.exit(status)
"""


class Crictl:
    """The command on one node; serves until the test ends."""

    def __init__(self, engine: CriEngine) -> None:
        self._engine = engine
        self.called: list[str] = []  # verbs
        engine.write("/usr/local/bin/crictl", _SCRIPT)
        engine.namespace.path("/usr/local/bin/crictl").chmod(0o755)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(engine.scratch / _SOCKET))
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as stream:
            words, files = json.loads(stream.readline())
            try:
                answer = 0, self._run(words, {path: json.loads(text) for path, text in files.items()})
            except grpc.RpcError as error:
                answer = 1, f"FATA[0000] {' '.join(words)}: rpc error: {error.details()}"
            stream.write(json.dumps(answer) + "\n")

    def _run(self, words: Sequence[str], files: Mapping[str, Any]) -> str:
        call = self._engine.call
        if words[0] == "--timeout":
            words = words[2:]
        options = [word for word in words if word.startswith("-")]
        verb, *rest = [word for word in words if not word.startswith("-")]
        self.called.append(verb)
        match verb:
            case "ps":
                return "\n".join(each.id for each in call("ListContainers").containers if each.state == RUNNING)
            case "inspect":
                return _status(call("ContainerStatus", container_id=rest[0], verbose=True))
            case "inspectp":
                return _status(call("PodSandboxStatus", pod_sandbox_id=rest[0], verbose=True))
            case "checkpoint":
                (path,) = (word.removeprefix("--export=") for word in options if word.startswith("--export="))
                call("CheckpointContainer", container_id=rest[0], location=path)
            case "runp":
                (handler,) = (word.partition("=")[2] for word in options if word.startswith("--runtime="))
                pod = self._read("PodSandboxConfig", files[rest[0]])
                new: str = call("RunPodSandbox", config=pod, runtime_handler=handler).pod_sandbox_id
                return new
            case "create":
                sandbox, container, pod = rest
                config = self._read("ContainerConfig", files[container])
                configs = {"config": config, "sandbox_config": self._read("PodSandboxConfig", files[pod])}
                made: str = call("CreateContainer", pod_sandbox_id=sandbox, **configs).container_id
                return made
            case "start":
                call("StartContainer", container_id=rest[0])
            case "rmp":
                call("StopPodSandbox", pod_sandbox_id=rest[0])
                call("RemovePodSandbox", pod_sandbox_id=rest[0])
            case _:
                raise AssertionError(words)
        return rest[0]

    def _read(self, kind: str, fields: dict[str, Any]) -> Any:  # noqa: ANN401 - a message of the CRI
        return json_format.ParseDict(fields, self._engine.message(kind), ignore_unknown_fields=True)


def _status(answer: Any) -> str:  # noqa: ANN401 - a message of the CRI
    info = {}
    for key, text in answer.info.items():
        try:
            info[key] = json.loads(text)
        except ValueError:
            info[key] = text
    # `info` of the engine has the one key `info`, and so crictl shows it.
    return json.dumps({"status": json_format.MessageToDict(answer.status), **info})
