"""Facts about each backend that need no import of it: one record, which all code outside the backend's folder reads.

`OWN` contains the records of this package. Another package registers a record with an entry point of the group
`charonia.backends`, `name = "module:RECORD"`. It has the same rights, except that its models are code for the platform
unless the administrator trusts it. If several records claim a file or a name, the first one wins; `OWN` comes first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import entry_points
from pathlib import PurePosixPath

ENTRY_POINT_GROUP = "charonia.backends"

ENSEMBLE = "ensemble"
"""Platform of a model that is a graph of other models; it has no backend."""

PYTHON = "python"
"""The backend of Python files, and of the functions in them."""


@dataclass(frozen=True, slots=True)
class Form:
    """A form of models: how it is recognised, and its file name in a version's folder.

    Attributes:
        title: Noun with its article, "an ONNX model"; "" for files that only repositories have.
        suffixes: Suffixes of the file or folder.
        members: Patterns of the names that its folder must contain.
        start: First bytes of the file, if the suffix is ambiguous; b"" accepts any.
        filename: File name in a version's folder, "" if no backend serves the form.
        platform: Value of `platform` that implies backend and form, "" for none.
        is_exact: Whether the file must have exactly this name, because its suffix is ambiguous.
        has_helpers: Whether the folder may contain other files with the same suffix.
        is_refused: Whether the backend rejects the form, with a hint.
        is_pickle: Whether the file is a pickle, which the backend reads only if the configuration trusts it.
        weights: Suffix of a separate file with the weights, "" for none.
        kserve: KServe's name and version of the format, if the record's does not apply.
        lines: Lines for a shell that produce something a backend serves: templates with `{path}`, `{name}` and other
            fields of `charonia.config.forms.advice`.
        service: Service file that serves it, a template with `{path_text}`; `package` is the library that it needs.
        backend: Name of the backend; the record sets it.
    """

    title: str = ""
    suffixes: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    start: bytes = b""
    filename: str = ""
    platform: str = ""
    is_exact: bool = False
    has_helpers: bool = False
    is_refused: bool = False
    is_pickle: bool = False
    weights: str = ""
    kserve: tuple[str, str] | None = None
    lines: str = ""
    service: str = ""
    package: str = ""
    backend: str = ""

    @property
    def suffix(self) -> str:
        """The suffix that marks its file in a version's folder: ".onnx"; the whole name where that is exact."""
        return self.filename if self.is_exact else self.filename.removeprefix("model")

    def fits(self, name: str, entries: Sequence[str] | None, start: bytes) -> bool:
        """Return whether a file, or a folder with these entries, has this form."""
        if self.suffixes and PurePosixPath(name).suffix.lower() not in self.suffixes:
            return False
        if self.start and not start.startswith(self.start):
            return False
        if self.members:
            return entries is not None and all(any(fnmatchcase(e, m) for e in entries) for m in self.members)
        return entries is None


@dataclass(frozen=True, slots=True)
class Package:
    """A package that a backend uses.

    Attributes:
        name: Name in package indexes.
        module: Module to import.
        extra: Extra of Charonia that installs it, "" for none.
        hint: Installation instructions, if there is no extra.
        purpose: Models that require it: "PyTorch models".
        optional: Whether models load without it.
    """

    name: str
    module: str
    extra: str = ""
    hint: str = ""
    purpose: str = ""
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Preset:
    """An environment that the platform offers.

    Attributes:
        name: Name of the environment.
        title: Title on pages.
        about: One sentence.
        requirements: Lines of its requirements.
        imports: Modules that its test imports.
    """

    name: str
    title: str
    about: str
    requirements: str
    imports: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Inert:
    """An allow-list: a model is data if all of its files and parameters are listed here, otherwise code.

    Attributes:
        suffixes: Suffixes of files that are data.
        parameters: Parameters that do not name a file, library or program.
        values: The harmless values of parameters that also have dangerous ones.
        starts: First bytes of a file that is data, after white space; empty accepts any.
    """

    suffixes: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    starts: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRecord:
    """One backend.

    Attributes:
        name: Name, the value of `backend` in configurations.
        factory: Class or function that creates the backend, "module:callable". The first model that needs it imports
            the module.
        aliases: Other names.
        forms: Files that the backend reads, in search order.
        chooses_file: Whether the backend selects the file itself among its forms.
        runtimes: Accepted values of `runtime`, besides the backend's own library.
        packages: Packages that the backend uses.
        ragged: Whether a batch may contain requests of different shapes.
        scalars: Whether tensors may have no dimensions.
        plans: Whether models are compiled plans, with profiles, shape tensors and files by compute capability.
        in_front_ends: Whether front ends may load the models. Such models must be stateless, and each process has a
            copy.
        reads_parameters: Whether models receive the parameters of requests.
        fixed_instances: Why the number of instances cannot change at run time, "" if it can.
        computes: Whether an instance keeps a core busy. False for instances that mostly wait or start processes.
        shares_weights: Whether instances on the CPU share one copy of the weights.
        thread_parameter: Model parameter for the threads of an instance, which `charonia tune` varies; "" for none.
        needs_gpu: Whether models require a GPU.
        without_gpu: Hint for machines without a GPU, "" for none.
        trust_parameter: Model parameter that allows files to run code while they are read, "" for none.
        check: Function that finds out without loading a model why it cannot be served, "module:callable". It receives
            the configuration and returns a problem and a hint, or two empty strings.
        inert: Which models are data. None: all models are code.
        parameter_file: File of a version with more parameters, as a JSON object; "" for none.
        kserve: KServe's name and version of the format. None: the format of repositories.
        prepares: Whether the models prepare inputs and post-process outputs for a model that computes.
        preset: Environment that the platform offers for the backend, None for none.
        mlflow: Flavors of MLflow that the backend serves, each with the field that contains the path.
        problem: Why the record of another package cannot be loaded, "" if it can.
    """

    name: str
    factory: str = ""
    aliases: tuple[str, ...] = ()
    forms: tuple[Form, ...] = ()
    chooses_file: bool = False
    runtimes: tuple[str, ...] = ()
    packages: tuple[Package, ...] = ()
    ragged: bool = False
    scalars: bool = False
    plans: bool = False
    in_front_ends: bool = False
    reads_parameters: bool = True
    fixed_instances: str = ""
    computes: bool = True
    shares_weights: bool = False
    thread_parameter: str = ""
    needs_gpu: bool = False
    without_gpu: str = ""
    trust_parameter: str = ""
    check: str = ""
    inert: Inert | None = None
    parameter_file: str = ""
    kserve: tuple[str, str] | None = None
    prepares: bool = False
    preset: Preset | None = None
    mlflow: tuple[tuple[str, str], ...] = ()
    problem: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "forms", tuple(replace(form, backend=self.name) for form in self.forms))

    @property
    def names(self) -> tuple[str, ...]:
        return self.name, *self.aliases


_ENGINE = "an engine runs all of its requests together, and another one would need all of the memory again"
_HERE = "charonia.server.backends"

# fmt: off
OWN = (
    BackendRecord(
        name="tensorflow", factory=f"{_HERE}.tensorflow.backend:TensorFlowBackend",
        forms=(
            Form("a TensorFlow SavedModel", members=("saved_model.pb*",), filename="model.savedmodel",
                 platform="tensorflow_savedmodel"),
            Form(filename="model.graphdef", platform="tensorflow_graphdef", is_refused=True),
            Form("a Keras model", (".keras",), filename="model.keras"),
        ),
        packages=(Package("tensorflow", "tensorflow", "tensorflow", purpose="TensorFlow models"),), scalars=True,
        reads_parameters=False, check=f"{_HERE}.tensorflow.backend:graph_problem", kserve=("tensorflow", "2"),
        preset=Preset("tensorflow-2", "TensorFlow 2", "SavedModels and Keras.", "charonia[tensorflow]",
                      ("tensorflow",)),
        mlflow=(("tensorflow", "data"), ("tensorflow", "saved_model_dir"), ("keras", "data")),
    ),
    BackendRecord(
        name="tensorrt", factory=f"{_HERE}.tensorrt.backend:TensorRtBackend",
        forms=(Form("a TensorRT plan", (".plan", ".engine", ".trt"), filename="model.plan", platform="tensorrt_plan"),),
        packages=(Package("tensorrt", "tensorrt", "tensorrt", purpose="TensorRT plans"),), plans=True,
        reads_parameters=False, needs_gpu=True, without_gpu="serve the ONNX model it was made from",
        kserve=("tensorrt", "10"),
    ),
    BackendRecord(
        name="onnxruntime", factory=f"{_HERE}.onnxruntime.backend:OnnxRuntimeBackend",
        forms=(Form("an ONNX model", (".onnx",), filename="model.onnx", platform="onnxruntime_onnx"),),
        packages=(Package("onnxruntime", "onnxruntime"),), ragged=True, scalars=True, in_front_ends=True,
        reads_parameters=False, shares_weights=True, thread_parameter="intra_op_thread_count",
        inert=Inert(
            frozenset({".onnx"}),  # standard operators only, none of which reaches a file or the network
            frozenset(
                {"intra_op_thread_count", "inter_op_thread_count", "execution_mode", "enable_mem_arena"}
                | {"enable_mem_pattern", "memory.enable_memory_arena_shrinkage", "arena_extend_strategy"}
                | {"cudnn_conv_algo_search", "do_copy_in_default_stream", "gpu_mem_limit"}
                | {f"session.{name}" for name in ("set_denormal_as_zero", "disable_prepacking", "dynamic_block_base")}
                | {f"session.{name}" for name in ("intra_op.allow_spinning", "inter_op.allow_spinning")}
                | {f"session.{name}" for name in ("intra_op.spin_duration_us", "force_spinning_stop")}
                | {f"session.{name}" for name in ("use_env_allocators", "disable_quant_qdq")}
                | {"optimization.enable_gelu_approximation", "optimization.enable_cast_chain_elimination"}
                # of its accelerators
                | {"precision_mode", "max_workspace_size_bytes", "trt_fp16_enable", "trt_engine_cache_enable"}
                | {"num_of_threads", "num_streams", "device_type"}
            ),
        ),
        kserve=("onnx", "1"),
        preset=Preset("onnx", "ONNX Runtime", "Models in ONNX, and nothing else.", "", ("onnxruntime",)),
        mlflow=(("onnx", "data"),),
    ),
    BackendRecord(
        name="tflite", factory=f"{_HERE}.tflite.backend:TfliteBackend",
        aliases=("armnn_tflite",),  # Triton's name
        forms=(Form("a TensorFlow Lite model", (".tflite",), filename="model.tflite"),),
        packages=(Package("ai-edge-litert", "ai_edge_litert", "tflite", purpose="TFLite models"),), scalars=True,
        in_front_ends=True, reads_parameters=False,
        inert=Inert(  # operators of TensorFlow are not linked
            frozenset({".tflite"}), frozenset({"tflite_num_threads", "num_threads", "SIGNATURE"})
        ),
        kserve=("tflite", "1"),
        preset=Preset("tflite", "LiteRT", "TensorFlow Lite models.", "charonia[tflite]", ("ai_edge_litert",)),
    ),
    BackendRecord(
        name="openvino", factory=f"{_HERE}.openvino.backend:OpenVinoBackend",
        forms=(
            Form("an OpenVINO model", (".xml",), filename="model.xml", weights=".bin"),
            Form("a PaddlePaddle model", (".pdmodel",), filename="model.pdmodel", weights=".pdiparams"),
            Form(filename="model.onnx"),
            Form(filename="model.tflite"),
        ),
        packages=(Package("openvino", "openvino", "openvino", purpose="OpenVINO models"),), scalars=True,
        in_front_ends=True, reads_parameters=False,
        fixed_instances="the instances of an OpenVINO model are streams of a network that is compiled for their number",
        shares_weights=True,
        inert=Inert(
            frozenset({".xml", ".onnx", ".tflite", ".pdmodel"}),  # standard operators, without a library of others
            frozenset(
                {"TARGET_DEVICE", "HINT_BF16", "SKIP_OV_DYNAMIC_BATCHSIZE", "ENABLE_BATCH_PADDING"}
                | {"RESHAPE_IO_LAYERS", "INFERENCE_NUM_THREADS", "NUM_STREAMS", "PERFORMANCE_HINT"}
                | {"PERFORMANCE_HINT_NUM_REQUESTS", "INFERENCE_PRECISION_HINT", "EXECUTION_MODE_HINT"}
                | {"COMPILATION_NUM_THREADS", "ENABLE_CPU_PINNING", "ENABLE_HYPER_THREADING", "SCHEDULING_CORE_TYPE"}
                | {"KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE"}
            ),
        ),
        kserve=("openvino", "1"),
        preset=Preset("openvino", "OpenVINO", "OpenVINO's IR, and ONNX on Intel.", "charonia[openvino]", ("openvino",)),
    ),
    BackendRecord(
        name="pytorch", factory=f"{_HERE}.pytorch.backend:PyTorchBackend",
        forms=(
            Form("a PyTorch model", (".pt", ".pth", ".jit", ".torchscript"), filename="model.pt",
                 platform="pytorch_libtorch"),
            Form("a PyTorch program", (".pt2",), filename="model.pt2", platform="torch_aoti"),
        ),
        runtimes=("model.py",),
        packages=(
            Package("torch", "torch", "torch", purpose="PyTorch models"),
            Package("safetensors", "safetensors", "torch", purpose="weights of PyTorch modules", optional=True),
        ),
        reads_parameters=False, kserve=("pytorch", "2"),
        preset=Preset("pytorch-2", "PyTorch 2", "TorchScript, exported programs, safetensors.", "charonia[torch]",
                      ("torch",)),
        mlflow=(("pytorch", "model_data"),),
    ),
    BackendRecord(
        name=PYTHON, factory=f"{_HERE}.python.backend:PythonBackend",
        forms=(Form("a Python file", (".py",), filename="model.py", has_helpers=True),),
        ragged=True,  # a model receives each request separately
        computes=False, kserve=("python", "3"), prepares=True,
    ),
    BackendRecord(
        name="fil", factory=f"{_HERE}.fil.backend:FilBackend",
        forms=(
            Form("an XGBoost model", (".json",), start=b'{"learner"', filename="xgboost.json"),
            Form("an XGBoost model", (".ubj", ".xgb", ".bst"), filename="xgboost.ubj"),
            Form("a LightGBM model", (".txt", ".lgb"), start=b"tree\n", filename="model.txt", is_exact=True,
                 kserve=("lightgbm", "4")),
            Form("a checkpoint of treelite", (".tl",), filename="checkpoint.tl"),
            Form(filename="xgboost.model"),
        ),
        chooses_file=True,  # by `model_type`
        packages=(Package("treelite", "treelite", "fil", purpose="forests"),), reads_parameters=False,
        shares_weights=True,
        inert=Inert(
            frozenset({".json", ".ubj", ".txt"}),  # text, and JSON in either form: libraries parse and check them
            frozenset(
                {"algo", "blocks_per_sm", "chunk_size", "cpu_nthread", "is_classifier", "layout", "model_type"}
                | {"output_class", "predict_proba", "predictor", "storage_type", "threads_per_tree", "threshold"}
                | {"transfer_threshold", "use_experimental_optimizations", "xgboost_allow_unknown_field"}
            ),
            {"model_type": ("xgboost_json", "xgboost_ubj", "lightgbm")},  # the others are dumps of memory
            (b"{", b"tree\n", b"tree\r"),
        ),
        kserve=("xgboost", "3"),
        preset=Preset("forests", "Forests", "XGBoost, LightGBM and treelite.", "charonia[fil]",
                      ("xgboost", "lightgbm")),
        mlflow=(("xgboost", "data"), ("lightgbm", "data")),
    ),
    BackendRecord(
        name="llama_cpp", factory=f"{_HERE}.llama_cpp.backend:LlamaCppBackend",
        forms=(Form("a GGUF model", (".gguf",), filename="model.gguf"),),
        packages=(Package("xllamacpp", "xllamacpp", "llama", purpose="GGUF models"),), fixed_instances=_ENGINE,
        inert=Inert(
            frozenset({".gguf"}),  # tensors and metadata; its template is rendered without access to Python
            frozenset(
                {"cache_prompt", "cache_ram_mib", "cache_type_k", "cache_type_v", "check_tensors", "ctx_shift"}
                | {"embd_normalize", "embedding", "fit_params", "flash_attn_type", "kv_unified", "load_mode"}
                | {"main_gpu", "n_batch", "n_cache_reuse", "n_ctx", "n_gpu_layers", "n_parallel", "n_predict"}
                | {"n_threads", "n_threads_batch", "n_ubatch", "no_kv_offload", "pooling_type", "reasoning_format"}
                | {"rope_freq_base", "rope_freq_scale", "rope_scaling_type", "split_mode", "swa_full", "use_jinja"}
                | {"verbosity", "warmup", "INITIALIZE_TIMEOUT_SECONDS"}
            ),
        ),
        parameter_file="model.json", kserve=("gguf", "3"),
        preset=Preset("llama-cpp", "llama.cpp", "Language models in GGUF, on any CPU.", "charonia[llama,openai]",
                      ("xllamacpp",)),
    ),
    BackendRecord(
        name="sklearn", factory=f"{_HERE}.sklearn.backend:SklearnBackend",
        forms=(
            Form("an estimator", (".skops",), filename="model.skops"),
            Form("an estimator", (".joblib",), filename="model.joblib", is_pickle=True),
            Form("an estimator", (".pkl", ".pickle"), filename="model.pkl", is_pickle=True),
            Form("a CatBoost model", (".cbm",), filename="model.cbm"),
        ),
        packages=(Package("scikit-learn", "sklearn", "sklearn", purpose="scikit-learn models"),),
        reads_parameters=False, shares_weights=True, trust_parameter="TRUSTED", kserve=("sklearn", "1"),
        preset=Preset("scikit-learn", "scikit-learn", "Estimators of scikit-learn.", "charonia[sklearn]", ("sklearn",)),
        mlflow=(("sklearn", "pickled_model"),),
    ),
    BackendRecord(
        name="vllm", factory=f"{_HERE}.vllm.backend:VllmBackend", forms=(Form(filename="model.json", is_exact=True),),
        packages=(Package("vllm", "vllm", "vllm"),), fixed_instances=_ENGINE, needs_gpu=True, kserve=("vllm", "1"),
        preset=Preset("vllm", "vLLM", "Language models on GPUs.", "charonia[vllm,openai]", ("vllm",)),
    ),
    BackendRecord(
        name="tensorrtllm", factory=f"{_HERE}.tensorrtllm.backend:TensorRtLlmBackend",
        forms=(Form(filename="model.yaml", is_exact=True),),
        packages=(
            Package("tensorrt_llm", "tensorrt_llm",
                    hint="NVIDIA documents two ways: the container nvcr.io/nvidia/tensorrt-llm/release, or CUDA "
                    "Toolkit and libopenmpi-dev, then `pip install tensorrt_llm`: "
                    "https://nvidia.github.io/TensorRT-LLM/latest/installation/installation-guide.html"),
        ),
        fixed_instances=_ENGINE, needs_gpu=True, kserve=("tensorrtllm", "1"),
    ),
    BackendRecord(
        name="image", factory=f"{_HERE}.image.backend:ImageBackend",
        packages=(
            Package("pillow", "PIL", "image", purpose="the image backend"),
            Package("cykooz-resizer", "cykooz_resizer", "image", purpose="fast resizing in the image backend",
                    optional=True),
        ),
        reads_parameters=False,
        fixed_instances="the instances of an image model share threads that are made when it is loaded",
        inert=Inert(
            parameters=frozenset(
                {"antialias", "background", "color", "crop", "exact", "exif_orientation", "filter", "layout"}
                | {"max_bytes", "max_pixels", "mean", "padding_position", "padding_value", "resize", "scale"}
                | {"scaled_decode", "size", "std", "threads"}
            )
        ),
        kserve=("image", "1"), prepares=True,
    ),
    BackendRecord(
        name="identity", factory=f"{_HERE}.identity:IdentityBackend", ragged=True, in_front_ends=True,
        reads_parameters=False, computes=False,
        inert=Inert(
            parameters=frozenset(
                {"creation_delay_sec", "enable_custom_tracing", "execute_delay_ms", "instance_wise_delay_multiplier"}
                | {"response_parameters"}
            )
        ),
    ),
)
"""The records of this package, in search order."""
# fmt: on

HUGGING_FACE = Form("a language model of Hugging Face", filename="model.json", backend="vllm")
"""A folder that vLLM serves where it is installed."""

OWN_NAMES = frozenset(name for record in OWN for name in record.names)


@cache
def records() -> tuple[BackendRecord, ...]:
    """Return the records, `OWN` first. Reads the metadata of the installed packages once."""
    found = list(OWN)
    taken = set(OWN_NAMES)
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        try:
            record = entry.load()
            problem = "" if isinstance(record, BackendRecord) else f"expected a BackendRecord, got {record!r:.100}"
        except Exception as error:  # another package's code: a broken one must not end the server
            problem = f"{type(error).__name__}: {error}"
        if problem:
            record = BackendRecord(name=entry.name, problem=f"'{entry.value}' cannot be loaded: {problem}")
        if taken.isdisjoint(record.names):
            found.append(record)
            taken |= set(record.names)
    return tuple(found)


def record_of(backend: str, platform: str = "") -> BackendRecord:
    """Return the record of a backend, or one with the defaults if it has none, such as a script's.

    Args:
        backend: Name of the backend.
        platform: Platform that implies the backend if the name is "".
    """
    name = backend or backend_of_platform().get(platform, "")
    return next((record for record in records() if name in record.names), BackendRecord(name=name))


def formats() -> tuple[Form, ...]:
    """Return the forms that backends read, in search order: the first form of a file selects the backend."""
    return tuple(form for record in records() for form in record.forms)


def served() -> tuple[Form, ...]:
    """Return the forms that can be served from a file, without a repository."""
    return tuple(form for form in formats() if form.title)


def presets() -> tuple[Preset, ...]:
    return tuple(sorted((each.preset for each in records() if each.preset is not None), key=lambda preset: preset.name))


def backend_of_platform() -> Mapping[str, str]:
    """Return the backend by platform."""
    found: dict[str, str] = {}
    for form in formats():
        if form.platform:
            found.setdefault(form.platform, form.backend)
    return found
