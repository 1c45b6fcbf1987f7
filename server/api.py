"""The HTTP control plane: parse, call the hierarchy, serialise.

Every route is a coroutine that does not await, so that it runs on the event loop that owns the
state it reads. Every error is a problem document (RFC 9457).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Path, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException

from . import __version__
from .access import Access, access_options
from .config import Settings
from .hierarchy import Hierarchy
from .metrics import Metrics
from .problems import problem, problems
from .readings import Readings
from .routes_blocks import block_router
from .sections import not_one_of
from .sizes import shown
from .stats import Stats, read_stats
from .tier_readings import NamespaceReading, SessionReading, TenantReading, TierReading

NAME_AT_MOST = 64
"""Characters of a name in a path."""


class Health(BaseModel):
    """That the server answers, or that it is ready for its full capacity."""

    status: Literal["ok"] = "ok"


def build_app(
    hierarchy: Hierarchy,
    metrics: Metrics,
    settings: Settings,
    ready: Callable[[], bool],
    routers: Iterable[APIRouter] = (),
) -> FastAPI:
    """Return the control plane over `hierarchy`, with more routes.

    `ready` says whether all memory is allocated.
    """
    app = FastAPI(
        title="kvtier",
        version=__version__,
        description="Control plane of a tiered KV cache server for vLLM.",
        responses=problems(400, 413, 421),
    )
    _add_health(app, ready)
    readings = Readings(hierarchy)
    guarded = (_metrics_router(metrics, readings), _readings_router(readings, ready))
    login = HTTPBearer(auto_error=False, description="Needed once http.token or read_token is set.")
    for router in (*guarded, block_router(hierarchy), *routers):
        app.include_router(
            router,
            responses=problems(401, 422, 429),
            dependencies=[Security(login), Depends(_check_query)],
        )
    app.add_middleware(Access, options=access_options(settings), metrics=metrics)
    app.add_exception_handler(StarletteHTTPException, _http_problem)
    app.add_exception_handler(RequestValidationError, _validation_problem)
    app.add_exception_handler(Exception, _server_problem)
    return app


def _add_health(app: FastAPI, ready: Callable[[], bool]) -> None:
    @app.get("/healthz")
    async def healthz() -> Health:
        """Whether the event loop answers."""
        return Health()

    @app.get("/readyz", responses=problems(503))
    async def readyz() -> Health:
        """Whether all memory is allocated. Blocks can be stored before that, but fewer."""
        if not ready():
            raise HTTPException(503, "The host tier's memory is still being allocated.")
        return Health()


def _metrics_router(metrics: Metrics, readings: Readings) -> APIRouter:
    router = APIRouter()

    @router.get(
        "/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}}
    )
    async def metrics_text() -> Response:
        """All metrics in Prometheus's text format."""
        readings.refresh_metrics()
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def _readings_router(readings: Readings, ready: Callable[[], bool]) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/stats")
    async def stats() -> Stats:
        """Totals since the start: lookups, tokens asked and served by tier, stores by outcome."""
        return read_stats(readings, ready=ready())

    @router.get("/v1/tiers")
    async def tiers() -> list[TierReading]:
        """State of all tiers of this server."""
        return readings.tiers()

    @router.get("/v1/tiers/{tier}", responses=problems(404))
    async def one_tier(
        tier: Annotated[str, Path(max_length=NAME_AT_MOST, description="Name of a tier.")],
    ) -> TierReading:
        """State of one tier."""
        known = {reading.tier.value: reading for reading in readings.tiers()}
        if tier not in known:
            names = ", ".join(known)
            raise HTTPException(404, f'There is no tier "{tier}" here; there is: {names}.')
        return known[tier]

    @router.get("/v1/sessions")
    async def sessions() -> list[SessionReading]:
        """Open data-plane sessions: the halves of the engines that are connected."""
        return readings.sessions()

    @router.get("/v1/namespaces")
    async def namespaces() -> list[NamespaceReading]:
        """Namespaces with their manifests: engines share blocks only inside one."""
        return readings.namespaces()

    @router.get("/v1/tenants")
    async def tenants() -> list[TenantReading]:
        """Totals of each tenant since the start; those beyond a thousand count as one, `other`."""
        return readings.tenants()

    return router


async def _check_query(request: Request) -> None:
    """A query that is misspelt would be passed over: a dry run would be none."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute), "only such routes are included"
    known = [field.alias for field in route.dependant.query_params]
    for name in request.query_params:
        if name not in known:
            what = not_one_of(name, known) if known else f"{shown(name)} means nothing here"
            raise HTTPException(422, f"query: {what}.")


async def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException), "registered for these only"
    detail = str(error.detail)
    if detail == HTTPStatus(error.status_code).phrase:
        detail = (
            f"{request.method} {request.scope['path']} is not served here; /docs lists what is."
        )
    return problem(request.scope["path"], error.status_code, detail, error.headers)


async def _validation_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError), "registered for these only"
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return problem(request.scope["path"], 422, f"{where}: {first['msg']}.")


async def _server_problem(request: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, and uvicorn logs it with its traceback.
    detail = f"{type(error).__name__}: the server's log has the details."
    return problem(request.scope["path"], 500, detail)
