"""What is wrong with a pod, as a sentence."""

from typing import Any

import pytest

from charonia.platform.targets.kubernetes.rollout import needs_log, never_becomes_ready, pod_reason, refusal


def pod(**status: Any) -> dict[str, Any]:
    server = {"name": "server", "resources": {"limits": {"memory": "512Mi"}}}
    return {"metadata": {"name": "reader-1"}, "spec": {"containers": [server]}, "status": status}


def container(*, waiting: str = "", said: str = "", ended: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    state = {"waiting": {"reason": waiting, "message": said}} if waiting else {"running": {}}
    last = {"lastState": {"terminated": ended}} if ended else {}
    return {"name": "server", "image": "charonia:9", "ready": False, "restartCount": 0, "state": state, **last, **more}


def unplaced(message: str) -> dict[str, Any]:
    return pod(conditions=[{"type": "PodScheduled", "status": "False", "message": message}])


CASES = {
    "no image": (
        pod(containerStatuses=[container(waiting="ImagePullBackOff", said="not found")]),
        "its image 'charonia:9' cannot be pulled, ImagePullBackOff: not found "
        "(hint: check its name, and whether the cluster may read it)",
    ),
    "first try": (
        pod(containerStatuses=[container(waiting="ErrImagePull", said="401 Unauthorized")]),
        "its image 'charonia:9' cannot be pulled, ErrImagePull: 401 Unauthorized "
        "(hint: check its name, and whether the cluster may read it)",
    ),
    "no name of an image": (
        pod(containerStatuses=[container(waiting="InvalidImageName", said="invalid reference format")]),
        "its image 'charonia:9' cannot be used, InvalidImageName: invalid reference format (hint: --kubernetes-image)",
    ),
    "no Secret": (
        pod(containerStatuses=[container(waiting="CreateContainerConfigError", said='secret "store" not found')]),
        'its container cannot be made, CreateContainerConfigError: secret "store" not found '
        "(hint: is a Secret or ConfigMap missing?)",
    ),
    "memory": (
        pod(
            containerStatuses=[
                container(waiting="CrashLoopBackOff", ended={"reason": "OOMKilled", "exitCode": 137}, restartCount=2)
            ]
        ),
        "it was killed because it needed more memory than the 512Mi that it may use, OOMKilled "
        "(hint: raise memory_mib)",
    ),
    "cores": (
        unplaced("0/3 nodes are available: 1 node(s) had untolerated taint {gpu: true}, 2 Insufficient cpu."),
        "it waits for a node: 0/3 nodes are available: 1 node(s) had untolerated taint {gpu: true}, 2 Insufficient "
        "cpu. (hint: no node has enough cpu free: ask for less, or add a node)",
    ),
    "GPUs": (
        unplaced("0/2 nodes are available: 2 Insufficient nvidia.com/gpu."),
        "it waits for a node: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu. "
        "(hint: no node has enough nvidia.com/gpu free: ask for less, or add a node)",
    ),
    "a taint": (
        unplaced("0/1 nodes are available: 1 node(s) had untolerated taint {dedicated: web}."),
        "it waits for a node: 0/1 nodes are available: 1 node(s) had untolerated taint {dedicated: web}. "
        "(hint: give pods a toleration in the file of values)",
    ),
    "a volume": (
        unplaced("0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims."),
        "it waits for its volume: 0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims. "
        "(hint: `kubectl get pvc` says which claim is not bound)",
    ),
    "evicted": (
        pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
        "it was evicted from its node: The node was low on resource: memory. (hint: memory_mib reserves memory for it)",
    ),
    "refused by its node": (
        pod(phase="Failed", reason="UnexpectedAdmissionError", message="no GPU left"),
        "its node has refused it, UnexpectedAdmissionError: no GPU left",
    ),
    "its node is away": (
        pod(conditions=[{"type": "Ready", "status": "False"}], containerStatuses=[container(ready=True)]),
        "its node no longer reports (hint: `kubectl get nodes` says which are not ready)",
    ),
    "it starts": (pod(containerStatuses=[container()]), ""),
    "packages are installed": (
        pod(
            initContainerStatuses=[container(name="install-packages")],
            containerStatuses=[container(waiting="PodInitializing")],
        ),
        "",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_a_sentence(case: str) -> None:
    found, expected = CASES[case]

    assert pod_reason(found) == expected


def test_a_server_that_ends_says_how_often_and_its_last_lines() -> None:
    found = pod(containerStatuses=[container(waiting="CrashLoopBackOff", ended={"exitCode": 1}, restartCount=4)])

    assert needs_log(found) == "server"
    assert pod_reason(found, log="a\nb\nc\nd\ne\nthe model is broken\n") == (
        "its server ends with exit code 1, 4 times so far:\nb\nc\nd\ne\nthe model is broken"
    )
    assert never_becomes_ready(found)
    assert not never_becomes_ready(pod(containerStatuses=[container(ended={"exitCode": 1}, restartCount=2)]))


def test_a_server_that_cannot_begin_says_what_the_node_says() -> None:
    ended = {"reason": "StartError", "exitCode": 128, "message": 'exec: "charonia": executable file not found in $PATH'}
    found = pod(containerStatuses=[container(waiting="CrashLoopBackOff", ended=ended, restartCount=1)])

    assert pod_reason(found) == (
        'its server ends with exit code 128:\nexec: "charonia": executable file not found in $PATH'
    )


def test_a_step_before_the_server_that_fails_is_named() -> None:
    ended = {"exitCode": 1}
    found = pod(initContainerStatuses=[container(name="install-packages", ended=ended, restartCount=1)])

    assert pod_reason(found, log="No matching distribution") == (
        "its step 'install-packages' ends with exit code 1:\nNo matching distribution"
    )


def test_a_step_that_has_ended_well_and_a_server_that_was_restarted_long_ago_are_fine() -> None:
    done = container(name="copy-models")
    done["state"] = {"terminated": {"exitCode": 0}}
    server = container(ended={"exitCode": 1}, restartCount=5, ready=True)

    assert pod_reason(pod(initContainerStatuses=[done], containerStatuses=[server])) == ""
    assert not never_becomes_ready(pod(initContainerStatuses=[done], containerStatuses=[server]))


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            {"reason": "FailedMount", "message": 'secret "keys" not found'},
            'a volume cannot be mounted: secret "keys" not found (hint: does the Secret or the claim exist?)',
        ),
        (
            {"reason": "FailedCreatePodSandBox", "message": "no address left"},
            "its node cannot start it: no address left",
        ),
        (
            {"reason": "Unhealthy", "message": "Liveness probe failed: timeout"},
            "it does not answer: Liveness probe failed: timeout",
        ),
        ({"reason": "Unhealthy", "message": "Readiness probe failed: statuscode 503"}, ""),  # models are loaded
    ],
)
def test_events_say_what_the_state_of_a_pod_does_not(event: dict[str, str], expected: str) -> None:
    assert pod_reason(pod(containerStatuses=[container()]), [event]) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("pods is forbidden: exceeded quota: team", "no pod can be made, the quota of the namespace is used up: "),
        (
            'admission webhook "policy" denied the request: no',
            "no pod can be made, the cluster's admission forbids it: ",
        ),
        ("etcd is away", "no pod can be made: "),
    ],
)
def test_why_no_pod_can_be_made(said: str, expected: str) -> None:
    failed = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": said}

    assert refusal({"status": {"conditions": [failed]}}) == expected + said
    assert refusal({"status": {"conditions": [{**failed, "status": "False"}]}}) == ""
