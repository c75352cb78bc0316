"""The header that a connection saw last: a client sends the same one again and again while only the body changes.

What the parser has understood once it would understand again, byte for byte. So a request that comes whole behind such
a header does not go through it: most of parsing a small request is calls for its header fields.
"""

from charonia.server.http.exchange import Exchange, Outlet

REMEMBERED_BYTES_MAX = 4096
"""Longest header that is remembered."""

_END = b"\r\n\r\n"
_NOT_PLAIN = (b"transfer-encoding", b"expect", b"upgrade", b"connection")


class HeadMemory:
    """One header and the size of the body behind it.

    To be asked about whatever arrives while no request is on its way: `recall`. What it does not know goes to the
    parser, and the request that comes of it to `learn`.
    """

    __slots__ = ("_arrived", "_head", "_message_size", "_parsed")

    def __init__(self) -> None:
        self._arrived: memoryview | None = None
        self._head = b""
        self._message_size = 0  # of a whole request
        self._parsed: tuple[bytes, bytes, dict[bytes, bytes]] = (b"", b"", {})  # method, request target, header fields

    def recall(self, outlet: Outlet, arrived: memoryview) -> Exchange | None:
        """Return the request that has arrived, None where it is not one whole request behind the header that is known.

        Its header fields are those of the request before it, so nobody may change them.
        """
        if len(arrived) == self._message_size:
            message = bytes(arrived)
            if message.startswith(self._head):
                exchange = Exchange(outlet, *self._parsed)
                exchange.body = message[len(self._head) :]
                return exchange
        self._arrived = arrived
        return None

    def pass_over(self) -> None:
        """What arrives now does not begin with a request."""
        self._arrived = None

    def learn(self, exchange: Exchange, body_size: int) -> None:
        """Take note of a request that has been parsed.

        Args:
            exchange: The request.
            body_size: Size of its body, as announced; 0 where it was not.
        """
        arrived, self._arrived = self._arrived, None
        if arrived is None or not body_size:
            return
        size = len(arrived) - body_size
        if size > REMEMBERED_BYTES_MAX or any(field in exchange.headers for field in _NOT_PLAIN):
            return
        head = bytes(arrived[:size])
        # The first empty line ends a header: so nothing came before the request, and nothing after it.
        if head.find(_END) == size - len(_END):
            self._head = head
            self._message_size = len(arrived)
            self._parsed = exchange.method, exchange.url, exchange.headers
