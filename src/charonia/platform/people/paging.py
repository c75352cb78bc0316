"""How much of a list a call wants, as parameters of routes."""

from typing import Annotated

from fastapi import Query

LIMIT_MAX = 200
"""Most entries of an answer."""

Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="How many at most.")]
Offset = Annotated[int, Query(ge=0, description="How many to skip.")]
