"""Errors of the control plane, as RFC 9457 describes them."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from pydantic import BaseModel
from starlette.responses import Response

PROBLEM_MEDIA_TYPE = "application/problem+json"


class Problem(BaseModel):
    """An error as RFC 9457 describes it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str


def problem(
    path: str, status: int, detail: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer to a request for `path` that failed."""
    text = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, instance=path)
    return Response(
        text.model_dump_json(), status, dict(headers or {}), media_type=PROBLEM_MEDIA_TYPE
    )
