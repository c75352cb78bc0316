"""All pages."""

from fastapi import APIRouter

from charonia.platform.console import (
    alert_pages,
    assets,
    deploy_pages,
    deployment_pages,
    environment_pages,
    job_pages,
    model_pages,
    people_page,
    traffic_pages,
    trial_pages,
)

router = APIRouter(include_in_schema=False)
for page in (
    assets,
    alert_pages,
    people_page,
    environment_pages,
    job_pages,
    model_pages,
    deploy_pages,  # before routes with a name in their address, so that "new" is not taken for one
    deployment_pages,
    traffic_pages,
    trial_pages,
):
    router.include_router(page.router)
