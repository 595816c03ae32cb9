"""Messages of CRIU's image files, from descriptors compiled out of CRIU's own .proto files (MIT, see LICENSE)."""

from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

_pool = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("criu.protoset").read_bytes()).file:
    _pool.Add(_file)


def message_class(name: str) -> type[Message]:
    """Return the class of CRIU's message `name`, spelled as in its .proto file."""
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(name))
