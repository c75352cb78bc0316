"""Compile src/charonia/schema/*.proto into the one file descriptors.binpb that `charonia.schema.pool` reads.

Run after any change of a .proto file: `python tools/compile_schema.py`. Needs grpcio-tools (a development dependency).
`python tools/compile_schema.py --check` changes nothing and exits with 1 where the file is not up to date.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc  # type: ignore[import-untyped]

SCHEMA = Path(__file__).resolve().parent.parent / "src" / "charonia" / "schema"
OUTPUT = SCHEMA / "descriptors.binpb"


def compile_schema(schema: Path = SCHEMA) -> bytes:
    """Return the serialized FileDescriptorSet of all .proto files in `schema` and of the files they import.

    The files are named relative to `schema` and stand in dependency order, as a descriptor pool wants them.

    Raises:
        RuntimeError: protoc refused a file; it has printed why.
    """
    # The package's own folder holds google/protobuf/*.proto.
    well_known = Path(protoc.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "descriptors.binpb"
        arguments = [f"--proto_path={schema}", f"--proto_path={well_known}", "--include_imports"]
        arguments += [f"--descriptor_set_out={output}", *sorted(path.name for path in schema.glob("*.proto"))]
        if protoc.main(["protoc", *arguments]) != 0:
            raise RuntimeError(f"protoc refused the files of {schema}")
        # Parsed and written again, such that the bytes depend on the schema only and not on the protoc that read it.
        files = FileDescriptorSet.FromString(output.read_bytes())
    return files.SerializeToString(deterministic=True)


def main() -> int:
    """Write the file, or with --check compare it. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if out of date")
    check = parser.parse_args().check
    compiled = compile_schema()
    if check:
        return 0 if OUTPUT.exists() and OUTPUT.read_bytes() == compiled else 1
    OUTPUT.write_bytes(compiled)
    sys.stdout.write(f"{OUTPUT}: {len(compiled)} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
