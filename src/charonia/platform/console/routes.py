"""All pages."""

from fastapi import APIRouter

from charonia.platform.console import (
    asset_route,
    audit_page,
    environment_pages,
    job_pages,
    model_pages,
    people_page,
    sign_in,
)

router = APIRouter(include_in_schema=False)
for page in (asset_route, sign_in, audit_page, people_page, environment_pages, job_pages, model_pages):
    router.include_router(page.router)
