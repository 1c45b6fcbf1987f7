"""Errors of the control plane, as RFC 9457 describes them."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from pydantic import BaseModel
from starlette.responses import Response

PROBLEM_MEDIA_TYPE = "application/problem+json"
DESCRIPTIONS = {
    400: "The request is malformed.",
    401: "There is no token, or a wrong one.",
    403: "The token may only read, or a web page of another server wants this.",
    404: "There is no such thing here.",
    409: "What is there does not allow it.",
    412: "Another version is in force.",
    413: "The body is too large.",
    421: "The Host header names another server.",
    422: "What is asked for makes no sense.",
    428: "If-Match is missing.",
    429: "Too many requests, or too much at once: Retry-After says when to try again.",
    503: "It is not ready yet.",
}


class Problem(BaseModel):
    """An error as RFC 9457 describes it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str


def problems(*statuses: int) -> dict[int | str, dict[str, object]]:
    """Return the documentation of answers that are problems."""
    content = {PROBLEM_MEDIA_TYPE: {"schema": Problem.model_json_schema()}}
    return {one: {"description": DESCRIPTIONS[one], "content": content} for one in statuses}


def problem(
    path: str, status: int, detail: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the answer to a request for `path` that failed."""
    text = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, instance=path)
    return Response(
        text.model_dump_json(), status, dict(headers or {}), media_type=PROBLEM_MEDIA_TYPE
    )
