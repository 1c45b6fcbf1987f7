"""Routes over the quotas of tenants: another name for the setting `quotas.tenants`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict

from .live import Live
from .problems import problems
from .quota_section import quota_texts
from .routes_tiers import Changed, DryRun, GuardWish, IfMatch, change
from .sections import QuotaText
from .tier_readings import QuotaReading


class QuotasWish(BaseModel):
    """Quotas of all tenants: they replace those that are there."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"quotas": {"acme": {"soft": "6GiB", "hard": "8GiB"}}}]},
    )

    quotas: QuotaText
    guard: GuardWish | None = None


class Quotas(BaseModel):
    """The quotas in force, and where tenants stand."""

    version: int
    quotas: QuotaText
    """By tenant; `*` stands for each that is not listed."""
    tenants: list[QuotaReading]


def quota_router(live: Live) -> APIRouter:
    """Return the routes over quotas."""
    router = APIRouter()

    @router.get("/v1/quotas")
    async def quotas(response: Response) -> Quotas:
        """Quotas of tenants, the bytes that they have, and what went or was refused for it."""
        response.headers["ETag"] = f'"{live.version}"'
        texts = quota_texts(live.settings.quotas.tenants)
        return Quotas(version=live.version, quotas=texts, tenants=live.quotas.readings())

    @router.put("/v1/quotas", responses=problems(403, 412, 428))
    async def change_quotas(
        request: Request,
        response: Response,
        wish: QuotasWish,
        if_match: IfMatch = None,
        dry_run: DryRun = False,
    ) -> Changed:
        """Replace the quotas: a change of the setting `quotas.tenants`."""
        changes = {"quotas.tenants": wish.quotas}
        return await change(live, request, response, changes, wish.guard, if_match, dry_run)

    return router
