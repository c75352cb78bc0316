"""Message classes of the protocol, from a descriptor pool of our own.

Protobuf's default pool is one for the process and refuses a second file that defines `inference.ModelConfig`. A private
pool lets a program import `tritonclient`, or generated code of its own, beside Charonia.

`descriptors.binpb` is made from the .proto files of this folder by `tools/compile_schema.py`.
"""

from functools import cache
from importlib.resources import files

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass


@cache
def file_set() -> FileDescriptorSet:
    """Return the compiled schema, every file after those it imports."""
    return FileDescriptorSet.FromString(files(__package__).joinpath("descriptors.binpb").read_bytes())


@cache
def pool() -> DescriptorPool:
    """Return the pool that holds the whole schema."""
    private = DescriptorPool()
    for file in file_set().file:
        private.AddSerializedFile(file.SerializeToString())
    return private


@cache
def message_class(full_name: str) -> type[Message]:
    """Return the class of a message by its full name, such as "inference.ModelConfig".

    Raises:
        KeyError: The schema has no such message.
    """
    return GetMessageClass(pool().FindMessageTypeByName(full_name))
