"""Runs batches of a plan."""

import logging
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from charonia.config.model import ModelConfig
from charonia.core.errors import internal, invalid, unavailable
from charonia.core.tensor import Array
from charonia.server.backends.array_instance import ArrayInstance
from charonia.server.backends.python.worker.cuda_driver import CudaError
from charonia.server.backends.tensorrt.gpu import GpuStream
from charonia.server.backends.tensorrt.options import GraphShapes, Shape, graph_shapes
from charonia.server.backends.tensorrt.plan import LoadedPlan, Profile

_log = logging.getLogger(__name__)


class _Graph:
    """A captured graph, and the shapes of the outputs that it computes."""

    def __init__(self, shapes: GraphShapes, handle: Any, outputs: Mapping[str, Shape]) -> None:
        self.shapes = shapes
        self.handle = handle
        self.outputs = outputs


class _Context:
    """A context of the engine in one profile, with the shapes of outputs that only a run tells."""

    def __init__(self, profile: Profile, native: Any) -> None:
        self.profile = profile
        self.native = native
        self.told: dict[str, Shape] = {}
        self.graphs: list[_Graph] = []


class PlanInstance(ArrayInstance):
    """An instance. To be made, and closed, with the GPU current.

    Args:
        plan: The plan on the GPU.
        config: The complete configuration.
        gpu: The GPU, with a stream of this instance's own.
        profiles: The optimization profiles that it uses.
        has_graphs: Whether CUDA graphs are captured.

    Attributes:
        bytes: Memory of the GPU that it takes for activations, inputs and outputs.

    Raises:
        ServingError: The GPU has not enough memory, or TensorRT refuses a profile or a shape.
        CudaError: The GPU fails.
    """

    def __init__(
        self, plan: LoadedPlan, config: ModelConfig, gpu: GpuStream, profiles: Sequence[Profile], *, has_graphs: bool
    ) -> None:
        super().__init__(config)
        self._plan = plan
        self._gpu = gpu
        sizes = (plan.engine.get_device_memory_size_for_profile_v2(profile.index) for profile in profiles)
        self._activations = gpu.take(max(sizes))
        self._on_gpu = {tensor.name: tensor for tensor in plan.tensors if not tensor.is_shape}
        self._values = {t.name: np.zeros(t.shape, t.datatype.numpy) for t in plan.tensors if t.is_shape}
        self._contexts = [self._open(profile) for profile in profiles]
        self._places = {name: gpu.take(size) for name, size in self._sizes().items()}
        self.bytes = self._activations.size + sum(place.size for place in self._places.values())
        has_unknown = [self._give_places(context) for context in self._contexts]
        if has_graphs and (self._values or any(has_unknown)):
            _log.warning("model '%s': no CUDA graphs are captured, as shapes depend on values", config.name)
        elif has_graphs:
            self._capture_all(config)

    def close(self) -> None:
        """Release contexts, graphs and memory."""
        super().close()
        with self._gpu.current():
            graphs = [graph.handle for context in self._contexts for graph in context.graphs]
            self._contexts.clear()
            self._gpu.close(graphs)
        self._places.clear()
        del self._activations

    def run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        """Run the plan: by a CUDA graph that serves the shapes, else in the context whose profile fits best."""
        gpu = self._gpu
        try:
            with gpu.current():
                try:
                    outputs = self._run(names, feed)
                finally:
                    gpu.wait()
        except CudaError as error:
            raise internal(f"the GPU failed: {error}") from error
        rows = next(iter(feed.values())).shape[0] if self.is_batched else 0
        return [self._values_of(name, rows) if output is None else output for name, output in outputs]

    # Inside.

    def _run(self, names: Sequence[str], feed: Mapping[str, Array]) -> list[tuple[str, Array | None]]:
        """Begin everything; return the outputs, None for those that lie in the memory of the CPU."""
        shapes = {name: array.shape for name, array in feed.items() if name in self._on_gpu}
        values = {name: self._shape_values(name, feed[name]) for name in feed if name in self._values}
        context = self._context_for(shapes, values)
        fitting = (graph for graph in context.graphs if graph.shapes.serves(shapes))
        graph = min(fitting, key=lambda graph: sum(map(prod, graph.shapes.upper.values())), default=None)
        captured = shapes if graph is None else graph.shapes.upper
        for name, shape in captured.items():
            self._put(name, feed[name], shape)
        if graph is not None:
            self._gpu.launch(graph.handle)
        else:
            self._set_shapes(context, shapes, values)
            self._enqueue(context)
        found = self._output_shapes(context) if graph is None else graph.outputs
        rows = next(iter(shapes.values()))[:1] if graph is not None and self.is_batched else None
        return [(name, self._output(name, found, rows)) for name in names]

    def _output(self, name: str, found: Mapping[str, Shape], rows: Shape | None) -> Array | None:
        """Begin to take an output; of the first rows only where the graph has computed more."""
        if name in self._values:
            return None
        shape = found[name] if rows is None else (*rows, *found[name][1:])
        return self._gpu.get(self._places[name].address, shape, self._on_gpu[name].datatype)

    def _context_for(self, shapes: Mapping[str, Shape], values: Mapping[str, Shape]) -> _Context:
        distances = [(context.profile.distance(shapes, values), context) for context in self._contexts]
        fitting = [(distance, context) for distance, context in distances if distance is not None]
        if not fitting:
            ranges = "; ".join(str(context.profile) for context in self._contexts)
            given = ", ".join(f"{name} {list(shape)}" for name, shape in {**shapes, **values}.items())
            others = len(self._plan.profiles) > len(self._contexts)
            raise invalid(
                f"no optimization profile of the plan takes {given}; it has {ranges}",
                hint="`profile` of the instance group selects others" if others else "",
            )
        return min(fitting, key=lambda each: each[0])[1]

    def _shape_values(self, name: str, array: Array) -> Shape:
        """Return the values of a shape tensor; a batch shares them, and they begin with its size."""
        if not self.is_batched:
            return tuple(map(int, array.reshape(-1)))
        if (array != array[:1]).any():
            raise invalid(f"input '{name}': requests of one batch must have the same values, which are shapes")
        return (array.shape[0], *map(int, array[0]))

    def _values_of(self, name: str, rows: int) -> Array:
        values = self._values[name]
        return np.tile(values[1:], (rows, 1)) if self.is_batched else values.copy()

    def _put(self, name: str, value: Array, shape: Shape) -> None:
        """Begin to copy an input to its place; what a graph takes beyond the value is filled with zeros."""
        if value.shape != shape:
            value = np.pad(value, [(0, to - size) for size, to in zip(value.shape, shape, strict=True)])
        self._gpu.put(value, self._places[name].address)

    def _open(self, profile: Profile) -> _Context:
        plan, gpu = self._plan, self._gpu
        native = plan.engine.create_execution_context(plan.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if native is None:
            raise unavailable(f"TensorRT makes no context for {profile}: {plan.logger.reasons()}")
        try:
            native.set_optimization_profile_async(profile.index, gpu.stream)
        except RuntimeError as error:
            raise invalid(f"TensorRT does not accept {profile}: {plan.logger.reasons()}") from error
        gpu.wait()
        native.set_device_memory(self._activations.address, self._activations.size)
        for name, values in self._values.items():
            native.set_tensor_address(name, values.ctypes.data)
        return _Context(profile, native)

    def _sizes(self) -> dict[str, int]:
        """Return how many bytes each input and output on the GPU has at most."""
        sizes = dict.fromkeys(self._on_gpu, 0)
        for context in self._contexts:
            profile = context.profile
            largest = {name: high for name, (_, _, high) in profile.shapes.items()}
            self._set_shapes(context, largest, {name: high for name, (_, _, high) in profile.values.items()})
            for name, tensor in self._on_gpu.items():
                shape = largest[name] if tensor.is_input else tuple(context.native.get_tensor_shape(name))
                size = prod(shape) * tensor.datatype.byte_size
                if not tensor.is_input:
                    size = max(size, context.native.get_max_output_size(name))
                if size < 0:
                    raise invalid(f"output '{name}' of the plan has no largest size: {list(shape)}")
                sizes[name] = max(sizes[name], size)
        return sizes

    def _give_places(self, context: _Context) -> bool:
        """Tell TensorRT where inputs and outputs are; return whether it tells the shape of an output only later."""
        native, has_unknown = context.native, False
        for name, place in self._places.items():
            native.set_tensor_address(name, place.address)
            if not self._on_gpu[name].is_input and -1 in tuple(native.get_tensor_shape(name)):
                has_unknown = native.set_output_allocator(name, self._plan.make_allocator(place, context.told))
        return has_unknown

    def _set_shapes(self, context: _Context, shapes: Mapping[str, Shape], values: Mapping[str, Shape]) -> None:
        for name, shape in shapes.items():
            if not context.native.set_input_shape(name, shape):
                raise invalid(f"the plan refuses input '{name}' {list(shape)}: {self._plan.logger.reasons()}")
        for name, numbers in values.items():
            self._values[name].reshape(-1)[:] = numbers
        try:
            missing = context.native.infer_shapes()
        except RuntimeError as error:
            raise invalid(f"the plan refuses the shapes of its inputs: {self._plan.logger.reasons()}") from error
        if missing:
            raise invalid(f"inputs {', '.join(missing)} of the plan are missing")

    def _enqueue(self, context: _Context) -> None:
        if not context.native.execute_async_v3(self._gpu.stream):
            raise internal(f"TensorRT failed: {self._plan.logger.reasons()}")

    def _output_shapes(self, context: _Context) -> dict[str, Shape]:
        return {
            name: context.told[name] if name in context.told else tuple(context.native.get_tensor_shape(name))
            for name, tensor in self._on_gpu.items()
            if not tensor.is_input
        }

    def _capture_all(self, config: ModelConfig) -> None:
        """Capture the graphs of each context; what `graph_spec` asks for must fit one of them."""
        for context in self._contexts:
            for shapes in graph_shapes(config, context.profile.usual()):
                if context.profile.distance(shapes.upper, {}) is not None:
                    context.graphs.append(self._capture(context, shapes))
        cuda = config.optimization.cuda if config.optimization is not None else None
        captured = [graph.shapes.upper for context in self._contexts for graph in context.graphs]
        wanted = graph_shapes(config, self._contexts[0].profile.usual()) if cuda is not None and cuda.graph_spec else []
        for index, shapes in enumerate(wanted):
            if shapes.upper not in captured:
                raise invalid(f"optimization.cuda.graph_spec[{index}]: no profile takes {dict(shapes.upper)}")

    def _capture(self, context: _Context, shapes: GraphShapes) -> _Graph:
        self._set_shapes(context, shapes.upper, {})
        self._enqueue(context)  # what TensorRT sets up in the first run must not be in the graph
        self._gpu.wait()
        handle = self._gpu.capture(lambda: self._enqueue(context))
        return _Graph(shapes, handle, self._output_shapes(context))
