"""The error of a model that fails before anything of it is loaded. Pure."""

from charonia.core.errors import Code, ServingError


class PollError(ServingError):
    """What a repository or a load request has of a model cannot be used.

    The code is INTERNAL and the message has a fixed start, for which programs look; UNAVAILABLE where a store cannot be
    reached, so that a later attempt may succeed.
    """

    def __init__(self, name: str, error: ServingError) -> None:
        """Make the error of the model `name` from that of the part which failed."""
        start = f"failed to load '{name}', failed to poll from model repository: "
        code = Code.UNAVAILABLE if error.code is Code.UNAVAILABLE else Code.INTERNAL
        super().__init__(code, start + error.message.removeprefix(start), hint=error.hint)
        self.reason = str(error)
