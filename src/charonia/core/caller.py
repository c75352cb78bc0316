"""The origin of a request that another model, or an ensemble, made."""

from collections.abc import Iterator


class CallFrame:
    """A model that made a request while it was working on one. Frames are compared by identity.

    Attributes:
        model: Its name.
        version: Its version, as text.
        instance: Name of the occupied instance; "" for an ensemble, which occupies none.
        parent: The caller of the request that the model is working on, None for a client.
    """

    __slots__ = ("instance", "model", "parent", "version")

    def __init__(self, model: str, version: str, instance: str = "", parent: "CallFrame | None" = None) -> None:
        self.model = model
        self.version = version
        self.instance = instance
        self.parent = parent

    def chain(self) -> Iterator["CallFrame"]:
        """Yield this frame and those above it, the client's side last."""
        frame: CallFrame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def __repr__(self) -> str:
        return f"CallFrame({' <- '.join(f'{f.model} v{f.version} {f.instance}'.strip() for f in self.chain())})"
