"""Message classes of the protocol, from a descriptor pool of our own.

Protobuf's default pool is one for the process and refuses a second file that defines `inference.ModelConfig`. A private
pool lets a program import `tritonclient`, or generated code of its own, beside Charonia.

Models are loaded by several threads, and classes of two pools do not fit together. So pool and classes are made when
this module is imported, which happens once.

`descriptors.binpb` is made from the .proto files of this folder by `tools/compile_schema.py`.
"""

from importlib.resources import files

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_FILES = FileDescriptorSet.FromString(files(__package__).joinpath("descriptors.binpb").read_bytes())
_POOL = DescriptorPool()
for _file in _FILES.file:
    _POOL.AddSerializedFile(_file.SerializeToString())
_CLASSES: dict[str, type[Message]] = {
    name: GetMessageClass(_POOL.FindMessageTypeByName(name))
    for name in (f"{file.package}.{message.name}" for file in _FILES.file for message in file.message_type)
}


def file_set() -> FileDescriptorSet:
    """Return the compiled schema, every file after those it imports."""
    return _FILES


def pool() -> DescriptorPool:
    """Return the pool that holds the whole schema."""
    return _POOL


def message_class(full_name: str) -> type[Message]:
    """Return the class of a message by its full name, such as "inference.ModelConfig".

    Raises:
        KeyError: The schema has no such message.
    """
    return _CLASSES[full_name]
