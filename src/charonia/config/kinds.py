"""The enumerations of the model configuration, with the names and numbers of its schema."""

from enum import Enum


class Format(Enum):
    """The order of an image input's dimensions."""

    FORMAT_NONE = 0
    FORMAT_NHWC = 1
    FORMAT_NCHW = 2


class InstanceKind(Enum):
    """Where the instances of a group run."""

    KIND_AUTO = 0
    KIND_GPU = 1
    KIND_CPU = 2
    KIND_MODEL = 3


class SecondaryDeviceKind(Enum):
    """Kind of a helper device."""

    KIND_NVDLA = 0


class TimeoutAction(Enum):
    """The effect of an expired queue timeout."""

    REJECT = 0
    DELAY = 1


class ModelPriority(Enum):
    """Priority of a model's kernels on its device."""

    PRIORITY_DEFAULT = 0
    PRIORITY_MAX = 1
    PRIORITY_MIN = 2


class BatchInputKind(Enum):
    """How a batch input is computed from the batch."""

    BATCH_ELEMENT_COUNT = 0
    BATCH_ACCUMULATED_ELEMENT_COUNT = 1
    BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = 2
    BATCH_MAX_ELEMENT_COUNT_AS_SHAPE = 3
    BATCH_ITEM_SHAPE = 4
    BATCH_ITEM_SHAPE_FLATTEN = 5


class BatchOutputKind(Enum):
    """How a batch output is scattered to the requests."""

    BATCH_SCATTER_WITH_INPUT_SHAPE = 0


class ControlKind(Enum):
    """Meaning of a sequence control input."""

    CONTROL_SEQUENCE_START = 0
    CONTROL_SEQUENCE_READY = 1
    CONTROL_SEQUENCE_END = 2
    CONTROL_SEQUENCE_CORRID = 3
