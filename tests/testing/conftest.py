# A run of pytest inside a test forgets the modules that it has imported, and numpy cannot be imported twice. Whatever
# is imported here is there for all of them.
import tritonclient.grpc
import tritonclient.http  # noqa: F401

import charonia.server.embedding  # noqa: F401
