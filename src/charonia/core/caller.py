"""The call frame of a request that a model made."""

from collections.abc import Iterator


class CallFrame:
    """A model that makes a request while it executes one: a frame of a call stack across models.

    Frames are compared by identity.

    Attributes:
        model: Name of the model.
        version: Its version, as text.
        instance: Name of the instance that it occupies; "" for an ensemble, which occupies none.
        parent: The frame of the request that the model executes, None for a client's request.
    """

    __slots__ = ("instance", "model", "parent", "version")

    def __init__(self, model: str, version: str, instance: str = "", parent: "CallFrame | None" = None) -> None:
        self.model = model
        self.version = version
        self.instance = instance
        self.parent = parent

    def chain(self) -> Iterator["CallFrame"]:
        """Yield this frame and its callers, innermost first."""
        frame: CallFrame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def __repr__(self) -> str:
        return f"CallFrame({' <- '.join(f'{f.model} v{f.version} {f.instance}'.strip() for f in self.chain())})"
