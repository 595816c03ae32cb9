"""The compiled descriptors of CRIU's messages are those of the .proto files beside them."""

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

PROTO = Path(__file__).parents[2] / "ocihook/criu/proto"


def test_descriptors_have_not_drifted(tmp_path: Path) -> None:
    """`make proto` recompiles them."""
    compiled = tmp_path / "criu.protoset"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", "--include_imports"]
    files = sorted(PROTO.glob("*.proto"))
    subprocess.run([*command, f"--descriptor_set_out={compiled}", *files], check=True, timeout=60, capture_output=True)
    ours, fresh = (
        {file.name: file for file in FileDescriptorSet.FromString(path.read_bytes()).file if "google" not in file.name}
        for path in (PROTO / "criu.protoset", compiled)
    )
    assert ours == fresh
    assert set(ours) == {file.name for file in files}
