"""The limits of the HTTP endpoint."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What a client may ask of the endpoint. Beyond a limit it gets an error, and the server goes on.

    Attributes:
        body_bytes_max: Largest request body, as received and after decompression (`--http-max-input-size`).
        discard_bytes_max: A refused body up to this size is read and dropped so that the connection can live on.
        url_bytes_max: Longest URL.
        header_count_max: Most header fields of a request.
        header_bytes_max: Most bytes of all header fields of a request.
        chunk_count_max: Most chunks of a chunked body.
        pipeline_max: Requests of one connection in flight at which no more is read from it; what one read brought
            (`READ_BYTES`) is still taken.
        stream_unsent_bytes_max: Bytes of a response that is sent piece by piece that wait for its client; with more the
            request is given up: a model cannot be made to wait.
        connections_max: Most connections; one more is told so and closed.
        header_timeout_s: Longest time from a request's first byte to the end of its header.
        body_timeout_s: Longest time for a body, to which the time is added that `body_bytes_per_s_min` gives it.
        body_bytes_per_s_min: Slowest rate at which a body may arrive.
        write_timeout_s: Longest time in which a client takes nothing of a response that waits for it.
        idle_timeout_s: Longest time between two requests of a connection.
    """

    body_bytes_max: int = 64 * 1024 * 1024
    discard_bytes_max: int = 256 * 1024 * 1024
    url_bytes_max: int = 8 * 1024
    header_count_max: int = 100
    header_bytes_max: int = 64 * 1024
    chunk_count_max: int = 65_536
    pipeline_max: int = 32
    stream_unsent_bytes_max: int = 64 * 1024 * 1024
    connections_max: int = 16_384
    header_timeout_s: float = 30.0
    body_timeout_s: float = 60.0
    body_bytes_per_s_min: int = 4096
    write_timeout_s: float = 60.0
    idle_timeout_s: float = 600.0
