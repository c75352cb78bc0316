"""The Ray Serve application."""

import inspect
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from charonia.ray.options import AppOptions
from charonia.ray.replica import RayReplica

HEALTH_PERIOD_S = 5.0
"""Time between two health checks of a replica."""

LOOK_BACK_MIN_S = 11.0
"""Shortest time over which Ray averages requests in flight: it counts them every 10 s, and requires a longer time."""

ON_RAYS_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""Makes Ray run a replica's code on the event loop of Ray's calls. By default Ray gives that code a thread, because it
might block. A server does not block, and saves the round trip of each request to another thread."""


def app(options: AppOptions | None = None, /, **given: Any) -> Application:
    """Return the application of model repositories, for `serve.run`.

    As the builder of `serve run charonia.ray:app repository=models` and of a file of `serve deploy`, it takes the same
    arguments from there.

    Args:
        options: All options; None for keyword arguments.
        **given: The fields of `AppOptions`.

    Raises:
        pydantic.ValidationError: An option is unknown, missing or wrong; a ValueError.
    """
    if options is None:
        options = AppOptions(**given)
    scaling: dict[str, Any] = {"num_replicas": options.min_replicas}
    if options.max_replicas > options.min_replicas:
        scaling = {
            "autoscaling_config": {
                "min_replicas": options.min_replicas,
                "max_replicas": options.max_replicas,
                "target_ongoing_requests": options.target_ongoing_requests,
                # Ray averages over 30 s, so that idle replicas would stay 30 s longer than a short delay says.
                "look_back_period_s": min(
                    30.0, max(options.autoscaling.get("downscale_delay_s", 30.0), LOOK_BACK_MIN_S)
                ),
                **options.autoscaling,
            }
        }
    deploy = serve.deployment(
        name=options.name,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus, **_environment()},
        max_ongoing_requests=options.max_ongoing_requests,
        # First the requests of Ray's proxies complete, then the requests on the replica's own ports.
        graceful_shutdown_timeout_s=2 * options.drain_s,
        health_check_period_s=HEALTH_PERIOD_S,
        **scaling,
    )
    application: Application = deploy(RayReplica).bind(options)
    return application


def _environment() -> dict[str, Any]:
    """Return the runtime environment of this program with `ON_RAYS_LOOP`: Ray does not merge the two.

    Before `ray.init`, the program's runtime environment is unknown. Then replicas just inherit it.
    """
    if not ray.is_initialized():
        return {}
    program = dict(ray.get_runtime_context().runtime_env)
    return {"runtime_env": {**program, "env_vars": {**ON_RAYS_LOOP, **program.get("env_vars", {})}}}


# Ray takes builders with one parameter, and reads arguments as its type.
app.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [inspect.Parameter("options", inspect.Parameter.POSITIONAL_ONLY, annotation=AppOptions)],
    return_annotation=Application,
)
