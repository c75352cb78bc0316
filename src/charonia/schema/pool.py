"""Message classes of the protocol, from a private descriptor pool.

Protobuf's default pool is shared by the whole process and refuses a second file that defines `inference.ModelConfig`.
With a private pool, a program can import `tritonclient`, or its own generated code, beside Charonia.

Classes of two pools are not compatible, and models are loaded by several threads. So the pool and the classes are made
once, when this module is imported.

`tools/compile_schema.py` makes `descriptors.binpb` from the .proto files of this folder.
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
    return _POOL


def message_class(full_name: str) -> type[Message]:
    """Return the class of a message by its full name, such as "inference.ModelConfig".

    Raises:
        KeyError: The schema lacks the message.
    """
    return _CLASSES[full_name]
