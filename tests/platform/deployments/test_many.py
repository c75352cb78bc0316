"""A hundred deployments."""

import time

from tests.platform.conftest import on_both
from tests.platform.deployments.conftest import ADA, Stage
from tests.support.statements import noted

from charonia.platform.deployments.reconciler import STEADY_S

COUNT = 100
CORE_SHARE_MAX = 0.05


def test_a_hundred_deployments_of_which_nothing_is_to_be_done_cost_little(stage: Stage) -> None:
    for number in range(COUNT):
        stage.deployments.changes.create(ADA, "default", stage.spec(f"reader-{number}"))
        stage.pass_s(0.05, step_s=0.05)  # so that their times to be looked at are different
    stage.pass_s(5, step_s=0.05)
    assert {server.serving for server in stage.target.servers.values()} == {1}

    began_s, simulated_s = time.process_time(), 60.0
    looks, end_s = stage.target.looks, stage.now_s + simulated_s
    while stage.now_s < end_s:
        stage.now_s = stage.deployments.reconciler.step(stage.now_s)
    used_s = time.process_time() - began_s

    assert stage.target.looks - looks >= COUNT * int(simulated_s / STEADY_S)
    assert used_s / simulated_s < CORE_SHARE_MAX


@on_both
def test_a_list_of_a_hundred_takes_as_many_statements_as_one_of_two(stage: Stage) -> None:
    for number in range(COUNT):
        stage.deployments.changes.create(ADA, "default", stage.spec(f"reader-{number:03}"))

    with noted(stage.database.engine) as few:
        stage.deployments.reads.list(ADA, "default", limit=2)
    with noted(stage.database.engine) as many:
        found, total = stage.deployments.reads.list(ADA, "default", limit=200)

    assert (len(found), total) == (COUNT, COUNT)
    assert [view.name for view in found] == sorted(view.name for view in found)
    assert 0 < len(few) == len(many)
    assert stage.deployments.reads.list(ADA, "default", search="099")[1] == 1
