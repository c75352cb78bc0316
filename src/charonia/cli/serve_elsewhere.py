"""What stands in `charonia serve` for options that people know from other servers."""

from charonia.cli.command_line import refused, without_effect

_PATH_HINT = "charonia serve PATH, the folder or file itself"
_PLACE_HINT = (
    "instance_group in a model's config.pbtxt says where its instances run; without it, on the GPUs if there are any"
)
_CERTIFICATE_HINT = "--http-use-ssl=true with --http-server-cert and --http-server-key"

ELSEWHERE = {
    **dict.fromkeys(("--model", "--models", "--model-dir", "--model_dir", "--model-path", "--model_path"), _PATH_HINT),
    **dict.fromkeys(("--model_base_path", "--model_repository", "--model-repo", "--repository"), _PATH_HINT),
    **dict.fromkeys(("--model-name", "--served-model-name"), "--name names the model of a file"),
    **dict.fromkeys(("--rest-port", "--rest_port", "--rest_api_port"), "--http-port"),
    **dict.fromkeys(("--bind", "--address"), "--host and --port"),
    **dict.fromkeys(
        ("--device", "--devices", "--gpu", "--gpus", "--accelerator", "--tensor-parallel-size"), _PLACE_HINT
    ),
    **dict.fromkeys(("--log-level", "--log_level", "--verbose", "--debug"), "--log-verbose=1 logs more"),
    **dict.fromkeys(("--batch-size", "--batch_size", "--max_batch_size"), "--max-batch-size"),
    **dict.fromkeys(("--ssl-certfile", "--ssl-keyfile"), _CERTIFICATE_HINT),
    "--api-key": "--api-keys FILE; charonia key makes a key",
    "--timeout": "a request has its own, the parameter timeout in microseconds; --exit-timeout-secs is for the end",
}
"""What stands here for options that people know from other servers."""

_THREADS = "an event loop replaces these threads"
_POOL = "there is no such memory pool"

UNSUPPORTED = (
    *without_effect(_THREADS, "--http-thread-count", "--grpc-infer-thread-count", "--buffer-manager-thread-count"),
    *without_effect(_THREADS, "--sagemaker-thread-count", "--vertex-ai-thread-count"),
    *without_effect(_POOL, "--grpc-infer-allocation-pool-size", "--grpc-max-response-pool-size"),
    *without_effect(_POOL, "--cuda-memory-pool-byte-size", "--cuda-virtual-address-size"),
    *without_effect("there are no copies between GPUs", "--enable-peer-access"),
    *without_effect("caches are part of the server", "--cache-directory"),
    *refused("models are not limited to a share of a GPU's memory", "--model-load-gpu-limit"),
    *refused("CUDA_VISIBLE_DEVICES says which GPUs are used", "--min-supported-compute-capability"),
)
"""Options of tritonserver that are known, and have no effect or are refused."""
