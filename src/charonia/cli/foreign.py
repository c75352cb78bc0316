"""Options of Triton that have no meaning here, or whose feature is not here.

Start scripts are full of them. One that only tunes the other server's insides is accepted, and the log says that it
does nothing. One that asks for a behaviour is refused, unless its value says that the behaviour is not wanted.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForeignOption:
    """An option that is known and has no effect.

    Attributes:
        name: With its dashes.
        reason: Why, as the end of a sentence.
        is_refused: Whether it is an error to use it.
        harmless: Values, in lower case, that ask for what happens anyway.
    """

    name: str
    reason: str
    is_refused: bool = False
    harmless: frozenset[str] = frozenset()


_OFF = frozenset({"false", "0", "off", "no"})
_NONE = frozenset({"", "0"})

_THREADS = "an event loop takes the place of these threads"
_POOL = "there is no such memory pool"
_NOT_HERE = "that endpoint is not offered"


def _without_effect(reason: str, *names: str, harmless: frozenset[str] = frozenset()) -> tuple[ForeignOption, ...]:
    return tuple(ForeignOption(name, reason, harmless=harmless) for name in names)


def _refused(reason: str, *names: str, harmless: frozenset[str] = frozenset()) -> tuple[ForeignOption, ...]:
    return tuple(ForeignOption(name, reason, is_refused=True, harmless=harmless) for name in names)


FOREIGN: tuple[ForeignOption, ...] = (
    *_without_effect(_THREADS, "--http-thread-count", "--grpc-infer-thread-count", "--buffer-manager-thread-count"),
    *_without_effect(_POOL, "--grpc-infer-allocation-pool-size", "--grpc-max-response-pool-size"),
    *_without_effect(_POOL, "--cuda-memory-pool-byte-size"),
    *_without_effect(_POOL, "--cuda-virtual-address-size"),
    *_without_effect("GPUs do not copy to each other here", "--enable-peer-access"),
    *_without_effect("caches are part of the server", "--cache-directory"),
    *_without_effect(_NOT_HERE, "--sagemaker-port", "--sagemaker-safe-port-range", "--sagemaker-thread-count"),
    *_without_effect(_NOT_HERE, "--vertex-ai-port", "--vertex-ai-thread-count", "--vertex-ai-default-model"),
    *_refused(_NOT_HERE, "--allow-sagemaker", "--allow-vertex-ai", harmless=_OFF),
    *_refused("models are not limited to a share of a GPU's memory", "--model-load-gpu-limit"),
    *_refused("CUDA_VISIBLE_DEVICES says which GPUs are used", "--min-supported-compute-capability"),
)

FOREIGN_BY_NAME: dict[str, ForeignOption] = {option.name: option for option in FOREIGN}


def judge(name: str, text: str) -> tuple[str, str]:
    """Return the problem and the note that come of a foreign option with this value; each is "" for none."""
    option = FOREIGN_BY_NAME[name]
    if text.strip().lower() in option.harmless:
        return "", ""
    if option.is_refused:
        return f"{name}={text}: {option.reason}", ""
    return "", f"{name} has no effect: {option.reason}"
