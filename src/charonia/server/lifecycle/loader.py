"""Loads one model version (backend, instances, scheduler, runner, response cache) and closes it again.

Finds an example request that the model of a file accepts, when it is loaded: its signature may allow too much.

For example, the signature of a network for text lines has variable height and width, but the network accepts no height
other than 48. Where it refuses the usual sizes of variable dimensions, others are tried. The result is kept in the
configuration as a warm-up sample that is never run, where `wire/example_inputs.py` finds it.

Warm-up runs bypass the scheduler and its statistics. An `AsyncInstance` whose worker may be restarted keeps the
samples, and runs them again before the new worker gets requests.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from math import prod

import numpy as np

from charonia.clock import now_ns
from charonia.config.json_form import to_json
from charonia.config.kinds import InstanceKind
from charonia.config.model import InstanceGroup, ModelConfig, ModelWarmup, WarmupInput
from charonia.config.parameters import EXAMPLE_REFUSED, TRY_EXAMPLE, bounds_of
from charonia.core.dtypes import DataType
from charonia.core.errors import ServingError, invalid
from charonia.core.raw_data import from_file, zeros
from charonia.core.request import CallFrame, InferRequest
from charonia.core.statistics import WorkerState
from charonia.core.tensor import Array, Tensor
from charonia.server.backends.api import LoadedModel, Placement, SelfChecking, SupervisedModel
from charonia.server.backends.warm_up import WarmUpBatch
from charonia.server.closing import close_safely
from charonia.server.execution.executor import Executor, make_executor
from charonia.server.execution.runner import ModelRunner
from charonia.server.execution.version_runner import Runner
from charonia.server.lifecycle.backends import Backends
from charonia.server.lifecycle.configure import model_files
from charonia.server.lifecycle.python_strategy import PythonStrategy, load_strategy
from charonia.server.lifecycle.repository.data_files import read_labels, read_state_files, read_warmup_files
from charonia.server.lifecycle.repository.model_folder import content_digest
from charonia.server.lifecycle.repository.scan import ModelFolder
from charonia.server.machine.cores import policy_name, share
from charonia.server.ragged.configuration import as_padded, padding_plan
from charonia.server.ragged.padding import PaddingStrategy, pad_instance
from charonia.server.rate_limiter.limiter import Claim
from charonia.server.response_cache.api import ResponseCache
from charonia.server.response_cache.runner import CachedRunner
from charonia.server.scaling.instances import MakeInstance, ScaledInstances
from charonia.server.scaling.rule import Demand, InstanceRule, demand_of, threads_of
from charonia.server.scheduling.dynamic import all_of
from charonia.server.scheduling.schedulers import make_scheduler
from charonia.server.sequences.models import make_sequence_runner
from charonia.server.sequences.runner import SequenceRunner
from charonia.server.sequences.tensors import initial_states
from charonia.wire.example_inputs import example_inputs

RANDOM_SEED = 20_260
"""Random data is the same at every load, so that a load that works once works again."""


@dataclass(frozen=True, slots=True)
class WarmupSample:
    """A batch that every instance runs before it gets requests.

    Attributes:
        name: Its name.
        path: Its path in the configuration.
        requests: The batch: as many equal requests as its batch size, of one batch element each.
        count: How often it is run.
    """

    name: str
    path: str
    requests: tuple[InferRequest, ...]
    count: int


def samples(config: ModelConfig, version: str, files: Mapping[str, bytes]) -> list[WarmupSample]:
    """Return the samples of a complete, validated configuration, without those of batch size 0.

    Raises:
        ServingError: INVALID_ARG, beginning with the path: the content of a file does not fit the input.
    """
    random = np.random.default_rng(RANDOM_SEED)
    found = []
    for index, sample in enumerate(config.model_warmup):
        if sample.batch_size:
            path = f"model_warmup[{index}]"
            inputs = _inputs(config, sample, path, files, random)
            requests = tuple(
                InferRequest(config.name, dict(inputs), model_version=version) for _ in range(sample.batch_size)
            )
            found.append(WarmupSample(sample.name, path, requests, max(1, sample.count)))
    return found


def _inputs(
    config: ModelConfig, sample: ModelWarmup, path: str, files: Mapping[str, bytes], random: np.random.Generator
) -> dict[str, Tensor]:
    lead = (1,) if config.max_batch_size > 0 else ()
    inputs = {}
    for name, warmup_input in sample.inputs.items():
        datatype = warmup_input.data_type
        if datatype is None:
            raise ValueError(f"warm-up input {name!r} has no data type: the configuration was not validated")
        array = _array(warmup_input, datatype, f"{path}.inputs[{name}]", files, random)
        inputs[name] = Tensor(name, datatype, array.reshape(lead + warmup_input.dims))
    return inputs


def _array(
    warmup_input: WarmupInput, datatype: DataType, path: str, files: Mapping[str, bytes], random: np.random.Generator
) -> Array:
    if warmup_input.input_data_file is not None:
        subject = f"{path}.input_data_file: '{warmup_input.input_data_file}'"
        return from_file(files[warmup_input.input_data_file], datatype, warmup_input.dims, subject)
    # Strings are empty: there is no sensible distribution of random ones.
    if warmup_input.random_data and datatype is not DataType.BYTES:
        return _random(datatype, prod(warmup_input.dims), random)
    return zeros(datatype, (prod(warmup_input.dims),))


def _random(datatype: DataType, count: int, random: np.random.Generator) -> Array:
    """Return random values: from 0 to 1 for floating point, over the whole range for integers."""
    if datatype is DataType.BF16:
        bits: Array = (random.random(count, np.float32).view("<u4") >> 16).astype(datatype.numpy)
        return bits
    if datatype.numpy.kind == "f":
        fractions: Array = random.random(count).astype(datatype.numpy)
        return fractions
    if datatype is DataType.BOOL:
        return random.integers(0, 2, count).astype(datatype.numpy)
    integers: Array = np.frombuffer(random.bytes(count * datatype.byte_size), datatype.numpy)
    return integers


async def warm(
    config: ModelConfig, version: str, executors: Sequence[Executor], samples: Sequence[WarmupSample]
) -> None:
    """Run every sample on every instance: instances in parallel, the samples of one in order.

    Raises:
        ServingError: INVALID_ARG, beginning with the sample's path, when one fails.
    """
    if not samples:
        return
    outcomes = await asyncio.gather(
        *(_warm_instance(config, version, executor, samples) for executor in executors), return_exceptions=True
    )
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    _log.info("warmed '%s' version %s: %d samples on %d instances", config.name, version, len(samples), len(executors))


async def _warm_instance(
    config: ModelConfig, version: str, executor: Executor, samples: Sequence[WarmupSample]
) -> None:
    for sample in samples:
        for _ in range(sample.count):
            error = await _run(config, version, executor, sample.requests)
            if error is not None:
                raise ServingError(
                    error.code,
                    f"{sample.path}: failed to run warmup sample '{sample.name}' on instance "
                    f"'{executor.placement.name}': {error.message}",
                    hint=error.hint,
                )
    executor.keep_warm([sample.requests for sample in samples for _ in range(sample.count)])


_log = logging.getLogger(__name__)

_ANYWHERE: Mapping[str, tuple[int, ...]] = {}

TRIAL_SIZES = (32, 48, 64, 224, 640)
"""Sizes that are tried in turn for all variable dimensions together, after the usual ones."""

TRIAL_ELEMENTS_MAX = 1 << 22
"""Largest example that is tried, in elements of all inputs."""

TRIAL_SECONDS_MAX = 5.0
"""Time after which no other size is tried."""


def without_trial(config: ModelConfig) -> ModelConfig:
    """Return the configuration of a served file as clients read it."""
    return replace(config, parameters={k: v for k, v in config.parameters.items() if k != TRY_EXAMPLE})


async def with_example(config: ModelConfig, version: str, executor: Executor) -> ModelConfig:
    """Return the configuration of a model with an example that it accepts, or with its error if it refuses all."""
    if TRY_EXAMPLE not in config.parameters:
        return config
    config = without_trial(config)
    if _shapes(example_inputs(config, 1)) == _shapes(example_inputs(config, 2)):
        return config  # nothing is guessed
    end_s = time.monotonic() + TRIAL_SECONDS_MAX
    refusal = ""
    for size in (0, *TRIAL_SIZES):
        inputs = example_inputs(config, size)
        if sum(tensor.array.size for tensor in inputs.values()) > TRIAL_ELEMENTS_MAX:
            continue
        requests = [InferRequest(config.name, dict(inputs), model_version=version)]
        error = await _run(config, version, executor, requests)
        if error is None:
            return replace(config, model_warmup=(_sample(config, inputs),)) if size else config
        refusal = refusal or error.message
        if time.monotonic() > end_s:
            break
    return replace(config, parameters={**config.parameters, EXAMPLE_REFUSED: refusal}) if refusal else config


async def _run(
    config: ModelConfig, version: str, executor: Executor, requests: Sequence[InferRequest]
) -> ServingError | None:
    """Run requests without callers on an executor, and return the first error."""
    over: asyncio.Future[ServingError | None] = asyncio.get_running_loop().create_future()
    frame = CallFrame(config.name, version)
    executor.run(WarmUpBatch(requests, frame, lambda error: None if over.done() else over.set_result(error)))
    return await over


def _sample(config: ModelConfig, inputs: Mapping[str, Tensor]) -> ModelWarmup:
    """Return a sample with the shapes of inputs; its batch size of 0 means that it is not run."""
    lead = 1 if config.max_batch_size > 0 else 0
    given = {n: WarmupInput(data_type=t.datatype, dims=t.shape[lead:], zero_data=True) for n, t in inputs.items()}
    return ModelWarmup("example", 0, given)


def _shapes(inputs: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
    return [tensor.shape for tensor in inputs.values()]


class SharedModel:
    """A model in memory, which successive versions may share that differ in their instances only."""

    def __init__(self, model: LoadedModel, name: str) -> None:
        self.model = model
        self.users = 1
        self._name = name

    async def aclose(self) -> None:
        """A version needs it no longer; the last one closes it. A failure of that is logged."""
        self.users -= 1
        if not self.users:
            await close_safely(self.model.aclose(), f"model '{self._name}'")


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A model version that answers.

    Attributes:
        runner: What runs its requests.
        model: The model in memory, None for an ensemble.
        labels: Class labels by output.
        claim: The resources of its instances in the rate limiter, None where they take none.
        strategy: Its own batching strategy, None where it has none.
        cache_namespace: Its namespace in the response cache, empty without a cache.
        scaling: Its instances, if their number follows the load.
        shared: The model, with the number of versions that have it; None for an ensemble.
        loaded_ms: When it was loaded, wall-clock time.
    """

    runner: Runner
    model: LoadedModel | None
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    claim: Claim | None = None
    strategy: PythonStrategy | None = None
    cache_namespace: bytes = b""
    scaling: ScaledInstances | None = None
    shared: SharedModel | None = None
    loaded_ms: int = field(default_factory=lambda: int(time.time() * 1000))

    @property
    def instances(self) -> int:
        """Number of its instances, 0 for an ensemble."""
        inner = self.runner.inner if isinstance(self.runner, CachedRunner) else self.runner
        return len(inner.instances) if isinstance(inner, ModelRunner) else 0

    def workers(self) -> list[WorkerState]:
        """Return the states of its worker processes; nothing for a model that computes in the server."""
        # Asked every second of each version: `isinstance` with a protocol would take 30 us.
        workers = getattr(self.model, "workers", None)
        return workers() if workers is not None else []

    @property
    def problem(self) -> str:
        """Which of its workers fail and why, "" while all are ready."""
        return "; ".join(f"instance '{w.instance}': {w.problem}" for w in self.workers() if w.problem)

    @property
    def is_down(self) -> bool:
        """Whether none of its workers is ready."""
        workers = self.workers()
        return bool(workers) and all(worker.problem for worker in workers)

    @property
    def is_failing(self) -> bool:
        return isinstance(self.model, SupervisedModel) and self.model.is_failing()

    @property
    def is_busy(self) -> bool:
        return bool(self.runner.in_flight) or self.has_sequences

    @property
    def has_sequences(self) -> bool:
        return isinstance(self.runner, SequenceRunner) and self.runner.live > 0

    async def is_ready(self) -> bool:
        """Return the model's own opinion whether it is ready; True for a model without one."""
        return not isinstance(self.model, SelfChecking) or await self.model.is_ready()

    async def retire(self) -> None:
        """Answer the requests in flight, then close everything."""
        try:
            if self.scaling is not None:
                await self.scaling.aclose()
            await self.runner.drain()
            await self.runner.aclose()
            if self.shared is not None:
                await self.shared.aclose()
        finally:
            if self.claim is not None:
                self.claim.release()
            if self.strategy is not None:
                self.strategy.close()


def placements(config: ModelConfig, cores: int, host: Mapping[str, tuple[int, ...]] = _ANYWHERE) -> list[Placement]:
    """Return every instance of a complete configuration, with its share of the cores.

    Args:
        config: A normalised configuration: kinds are decided, groups named.
        cores: Cores that this process may use.
        host: Numbers of cores by host policy.
    """
    on_cpu = sum(g.count for g in config.instance_group if g.kind is not InstanceKind.KIND_GPU)
    threads = share(cores, max(1, on_cpu))
    placed = []
    for group in config.instance_group:
        devices = group.gpus if group.kind is InstanceKind.KIND_GPU else (0,)
        index = 0
        for device in devices:
            bound = host.get(policy_name(group.host_policy, group.kind, device), ())
            for _ in range(group.count):
                placed.append(Placement(f"{group.name}_{index}", group.kind, device, threads, bound))
                index += 1
    sharing = Counter(placement.cores for placement in placed)
    return [replace(p, threads=min(p.threads, share(len(p.cores), sharing[p.cores]))) if p.cores else p for p in placed]


def instances_kept(before: LoadedVersion, config: ModelConfig) -> dict[tuple[str, int], Executor] | None:
    """Return the instances of a version that its next configuration has too, by name and device.

    None where the model must be loaded again: it may not know the kind or profile of a group.
    """
    runner = before.runner.inner if isinstance(before.runner, CachedRunner) else before.runner
    if not isinstance(runner, ModelRunner):
        return None
    known = {group.name: group for group in runner.config.instance_group}
    kinds = {group.kind for group in known.values()}
    unchanged = set()
    for group in config.instance_group:
        former = known.get(group.name, InstanceGroup())
        if group.kind not in kinds or group.profile != former.profile:
            return None
        if replace(group, count=former.count, gpus=former.gpus, rate_limiter=former.rate_limiter) == former:
            unchanged.add(group.name)
    placed = ((each.placement, each) for each in runner.instances.values())
    return {(at.name, at.device_id): each for at, each in placed if at.name.rpartition("_")[0] in unchanged}


async def load_version(
    folder: ModelFolder,
    version: int,
    config: ModelConfig,
    instances: int = 0,
    before: LoadedVersion | None = None,
    *,
    backends: Backends,
    cores: int,
) -> LoadedVersion:
    """Load a version of a model and warm its instances; a failure leaves nothing behind.

    Args:
        folder: The model's folder.
        version: The version.
        config: The complete configuration.
        instances: Instances that it has at once, within its bounds, where their number follows the load.
        before: The version that answers now, if only instances differ: the model and unchanged ones are shared.
        backends: The backends.
        cores: Cores that models may use.

    Raises:
        ServingError: With the reason.
    """
    started = now_ns()
    labels = await asyncio.to_thread(read_labels, folder, config)
    warmup_files = await asyncio.to_thread(read_warmup_files, folder, config)
    warmup = samples(config, str(version), warmup_files)
    states = initial_states(config, await asyncio.to_thread(read_state_files, folder, config))
    namespace = await cache_namespace(backends.cache, folder, version, config)
    placed = _with_more(placements(config, cores, backends.host_cores), config, instances, cores)
    _warn_of_policies(config, backends.host_cores)
    strategy = await asyncio.to_thread(load_strategy, folder, version, config)
    backend = await backends.get(config.backend, config.name)
    most = placements(_with_most(config), cores, backends.host_cores)
    claim = backends.limits.claim(config, str(version), most) if backends.limits is not None else None
    shared: SharedModel | None = None
    executors: list[Executor] = []
    kept = instances_kept(before, config) if before is not None else None
    try:
        if before is not None and before.shared is not None and kept is not None:
            shared = before.shared
            shared.users += 1
        else:
            padded, settings = as_padded(config), backends.settings(config.backend)
            shared = SharedModel(await backend.load(model_files(folder, version), padded, settings), config.name)
        model = shared.model
        executors, new = await _executors_for(model, placed, kept or {}, backends, config)
        await warm(config, str(version), new, warmup)
        config = await with_example(config, str(version), executors[0])
    except BaseException:
        for executor in executors:
            await executor.aclose()
        if shared is not None:
            await shared.aclose()
        if claim is not None:
            claim.release()
        if strategy is not None:
            strategy.close()
        raise
    runner = _make_runner(config, str(version), states, strategy, executors, labels, backends, claim)
    runner.metrics.load_seconds = (now_ns() - started) / 1e9
    runner.metrics.statistics.memory = model.memory()
    scaling = None
    if (bounds := bounds_of(config)) is not None:
        make = _maker(model, placed[0], backends, config, partial(warm, config, str(version), samples=warmup))
        demand = partial(_demand_of, model, runner, placed[0], claim)
        scaling = ScaledInstances(runner, InstanceRule(bounds, len(placed)), make, demand, placed[0].threads)
    behind = behind_cache(runner, backends.cache, namespace)
    return LoadedVersion(behind, model, labels, claim, strategy, namespace, scaling, shared)


def _warn_of_policies(config: ModelConfig, host: Mapping[str, tuple[int, ...]]) -> None:
    for group in config.instance_group:
        if group.host_policy and group.host_policy not in host:
            sentence = "instance group '%s' of model '%s' runs on any core: there is no --host-policy=%s,..."
            _log.warning(sentence, group.name, config.name, group.host_policy)


def _with_more(placed: list[Placement], config: ModelConfig, count: int, cores: int) -> list[Placement]:
    """Return the placements with those of further instances up to `count`, where their number follows the load."""
    bounds = bounds_of(config)
    count = min(count, bounds.most) if bounds is not None else 0
    names = [f"{config.instance_group[0].name}_{number}" for number in range(len(placed), count)]
    return placed + [
        replace(placed[0], name=name, threads=threads_of(share(cores, count), placed[0].threads)) for name in names
    ]


def _with_most(config: ModelConfig) -> ModelConfig:
    bounds = bounds_of(config)
    if bounds is None:
        return config
    return replace(config, instance_group=(replace(config.instance_group[0], count=bounds.most),))


def _maker(
    model: LoadedModel,
    first: Placement,
    backends: Backends,
    config: ModelConfig,
    warm_up: Callable[[Sequence[Executor]], Awaitable[None]],
) -> MakeInstance:
    async def make(number: int, threads: int) -> Executor:
        name = f"{config.instance_group[0].name}_{number}"
        (executor,) = await _make_executors(model, [replace(first, name=name, threads=threads)], backends, config)
        try:
            await warm_up([executor])
        except BaseException:
            await executor.aclose()
            raise
        return executor

    return make


def _demand_of(model: LoadedModel, runner: ModelRunner, placed: Placement, claim: Claim | None) -> Demand:
    gpu = placed.device_id if placed.kind is InstanceKind.KIND_GPU else None
    workers = model.workers() if isinstance(model, SupervisedModel) else []
    resources = claim.shortage(now_ns()).resources if claim is not None else ()
    return demand_of(runner.metrics.statistics.memory, workers, gpu, resources)


def _make_runner(
    config: ModelConfig,
    version: str,
    states: Mapping[str, Array],
    strategy: PythonStrategy | None,
    executors: Sequence[Executor],
    labels: dict[str, tuple[str, ...]],
    backends: Backends,
    claim: Claim | None,
) -> ModelRunner:
    """Return the runner that a configuration asks for, with its scheduler."""
    if config.sequence_batching is not None:
        return make_sequence_runner(
            config, version, states, executors=executors, labels=labels, shared=backends, claim=claim
        )
    padding = padding_plan(config)
    strategies: list[PythonStrategy | PaddingStrategy] = [strategy] if strategy is not None else []
    if padding is not None:
        strategies.append(PaddingStrategy(padding))
    scheduler = make_scheduler(config, all_of(strategies))
    runner = ModelRunner(
        config,
        version,
        scheduler=backends.observed(scheduler if claim is None else claim.scheduler(scheduler)),
        executors=executors,
        labels=labels,
        loop=asyncio.get_running_loop(),
        deadlocks=backends.deadlocks,
        busy_poll=backends.busy_poll,
        claim=claim,
    )
    for each in strategies:
        each.entry_of = runner.entry
    return runner


async def _executors_for(
    model: LoadedModel,
    placed: Sequence[Placement],
    kept: Mapping[tuple[str, int], Executor],
    backends: Backends,
    config: ModelConfig,
) -> tuple[list[Executor], list[Executor]]:
    """Return the executors of instances in order, those in `kept` shared, and which of them are new."""
    new = await _make_executors(
        model, [each for each in placed if (each.name, each.device_id) not in kept], backends, config
    )
    made, executors = iter(new), []
    for placement in placed:
        executor = kept.get((placement.name, placement.device_id))
        if executor is None:
            executor = next(made)
        else:
            executor.share()
        executors.append(executor)
    return executors, new


async def _make_executors(
    model: LoadedModel, placed: Sequence[Placement], backends: Backends, config: ModelConfig
) -> list[Executor]:
    """Make instances, and return their executors; when one of them fails, the others are closed."""
    loop, padding = asyncio.get_running_loop(), padding_plan(config)
    executors: list[Executor] = []
    made = await asyncio.gather(*(model.create_instance(p) for p in placed), return_exceptions=True)
    failures: list[BaseException] = []
    for instance, placement in zip(made, placed, strict=True):
        if isinstance(instance, BaseException):
            failures.append(instance)
            continue
        padded = instance if padding is None else pad_instance(instance, padding)
        try:
            executors.append(make_executor(padded, placement, loop, backends.busy_poll))
        except RuntimeError as error:  # there is no thread for it
            failures.append(error)
    if failures:
        for executor in executors:
            await executor.aclose()
        raise failures[0]
    return executors


def wants_cache(config: ModelConfig) -> bool:
    return config.response_cache is not None and config.response_cache.enable


async def cache_namespace(cache: ResponseCache | None, folder: ModelFolder, version: int, config: ModelConfig) -> bytes:
    """Return the cache namespace of a version that is being loaded; nothing where there is no cache.

    Every model has one, because an ensemble whose responses are cached may contain it.
    """
    if cache is None:
        if wants_cache(config):
            _log.warning("'%s' asks for a response cache, and the server has none (--cache-config)", config.name)
        return b""
    content = b""
    if cache.is_shared:
        text = repr(to_json(config)).encode()
        files = await asyncio.to_thread(content_digest, folder, version)
        content = sha256(sha256(text).digest() + files).digest()
    return await cache.namespace(config.name, str(version), content)


def ensemble_namespace(config: ModelConfig, members: Iterable[tuple[str, int, bytes]]) -> bytes:
    """Return the cache namespace of an ensemble: a new one whenever one of its models is loaded again.

    Args:
        config: Its configuration.
        members: Name, version and cache namespace of each version of its models.
    """
    parts = "\n".join(f"{name} {version} {namespace.hex()}" for name, version, namespace in sorted(members))
    return sha256(f"{to_json(config)!r}\n{parts}".encode()).digest()


def behind_cache(runner: Runner, cache: ResponseCache | None, namespace: bytes) -> Runner:
    """Return the runner, behind the response cache where there is one and the configuration asks for it.

    Raises:
        ServingError: INVALID_ARG for a decoupled ensemble.
    """
    config = runner.config
    if not wants_cache(config):
        return runner
    if config.is_decoupled:  # for an ensemble this is known only from its models
        raise invalid(
            f"response_cache.enable: Response Cache does not currently support model {config.name} with 'decoupled' "
            "transaction policy. Please disable the response cache."
        )
    return CachedRunner(runner, cache, namespace) if cache is not None else runner
