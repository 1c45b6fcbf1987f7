"""Routes that read and change settings while the server runs, and the audit of changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Header, HTTPException, Path, Query, Request, Response
from msgspec.structs import asdict
from pydantic import BaseModel, ConfigDict, Field

from .config import EffectiveSettings
from .core import Tier
from .errors import SettingsError
from .guard import GuardOptions
from .live import LIVE, Live, StaleError, Wish
from .policies import POLICIES
from .problems import problems
from .sections import Scalar, Value

PAGE_AT_MOST = 500
WHO_AT_MOST = 100


class LiveSettings(BaseModel):
    """The settings in force."""

    version: int
    settings: EffectiveSettings
    changed: dict[str, Value]
    """What was changed while a server ran, by key; it outlives restarts."""
    live: list[str]
    """Keys that can be changed."""


class GuardWish(BaseModel):
    """Roll the change back by itself if the token hit ratio falls."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"max_drop": 0.05}]})

    max_drop: float = Field(gt=0, lt=1, description="Hit ratio that may be lost, such as 0.05.")
    within_seconds: float = Field(
        600, ge=1, le=3600, description="For how long it is watched; as long before it counts."
    )
    least_tokens: int = Field(
        10_000, ge=1, description="Prompt tokens before and after without which nothing is said."
    )


class SettingsWish(BaseModel):
    """Settings to change, by dotted key, as a settings file would hold them."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"changes": {"host.policy": "lru"}}]},
    )

    changes: dict[str, Value] = Field(min_length=1, max_length=len(LIVE))
    guard: GuardWish | None = None


class TierWish(BaseModel):
    """Settings of one tier to change, as a settings file would hold them."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"settings": {"capacity": "200GiB"}, "guard": {"max_drop": 0.05}}]
        },
    )

    settings: dict[str, Scalar] = Field(min_length=1, max_length=len(LIVE))
    guard: GuardWish | None = None


class Changed(BaseModel):
    """What became of a change."""

    version: int
    changes: dict[str, tuple[Value, Value]]
    """By key: from, to. Empty if everything was so already."""
    evict_bytes: dict[str, int]
    """By tier, what has to go for it."""
    audit: int | None
    dry_run: bool


class AuditPage(BaseModel):
    """Entries of the audit, the newest first."""

    entries: list[dict[str, object]]
    before: int | None
    """Ask for entries before this one for the next page; absent at the end."""


DryRun = Annotated[bool, Query(description="Say what would happen, and change nothing.")]
IfMatch = Annotated[
    str | None, Header(description='The version that is changed, such as "7", or *.')
]


def settings_router(live: Live) -> APIRouter:
    """Return the routes over the settings in force."""
    router = APIRouter()

    @router.get("/v1/settings")
    async def settings(response: Response) -> LiveSettings:
        """The settings in force, what of them was changed, and which can be."""
        response.headers["ETag"] = f'"{live.version}"'
        return LiveSettings(
            version=live.version,
            settings=live.settings.effective(),
            changed=live.kept,
            live=list(LIVE),
        )

    @router.get("/v1/config")
    async def config() -> EffectiveSettings:
        """The settings in force, as a settings file would hold them."""
        return live.settings.effective()

    @router.patch("/v1/settings", responses=problems(403, 412, 428))
    async def change_settings(
        request: Request,
        response: Response,
        wish: SettingsWish,
        if_match: IfMatch = None,
        dry_run: DryRun = False,
    ) -> Changed:
        """Change settings, all or none of them."""
        return await change(live, request, response, wish.changes, wish.guard, if_match, dry_run)

    @router.patch("/v1/tiers/{tier}", responses=problems(403, 412, 428))
    async def change_tier(
        request: Request,
        response: Response,
        tier: Annotated[Tier, Path(description="host, disk or redis.")],
        wish: TierWish,
        if_match: IfMatch = None,
        dry_run: DryRun = False,
    ) -> Changed:
        """Change settings of one tier, all or none of them."""
        changes = {f"{tier}.{name}": value for name, value in wish.settings.items()}
        return await change(live, request, response, changes, wish.guard, if_match, dry_run)

    @router.get("/v1/policies")
    async def policies() -> list[str]:
        """Names of the eviction policies that a tier can have."""
        return list(POLICIES)

    @router.get("/v1/audit")
    async def audit(
        before: Annotated[int | None, Query(ge=1, description="Entries older than this.")] = None,
        limit: Annotated[int, Query(ge=1, le=PAGE_AT_MOST)] = 50,
    ) -> AuditPage:
        """Who changed what when, and what followed; the newest first."""
        entries = live.audit.page(before, limit)
        older = entries[-1].id if len(entries) == limit else None
        return AuditPage(entries=[asdict(entry) for entry in entries], before=older)

    return router


async def change(  # What a request is made of.
    live: Live,
    request: Request,
    response: Response,
    changes: Mapping[str, Value],
    guard: GuardWish | None,
    if_match: str | None,
    dry_run: bool,
) -> Changed:
    """Make a change that a request asks for, and answer it. Raises HTTPException."""
    if if_match is None and not dry_run:
        raise HTTPException(
            428, f'Say which version you change: If-Match: "{live.version}", or * for any.'
        )
    wish = Wish(
        who=_who(request),
        changes=changes,
        version=_version(if_match),
        dry_run=dry_run,
        guard=None if guard is None else GuardOptions(**guard.model_dump()),
    )
    try:
        done = await live.change(wish)
    except StaleError as stale:
        raise HTTPException(412, str(stale), {"ETag": f'"{live.version}"'}) from None
    except SettingsError as wrong:
        raise HTTPException(422, str(wrong)) from None
    response.headers["ETag"] = f'"{done.version}"'
    return Changed(
        version=done.version,
        changes=done.changes,
        evict_bytes=done.evict_bytes,
        audit=done.audit,
        dry_run=dry_run,
    )


def _version(if_match: str | None) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    text = if_match.strip().removeprefix("W/").strip('"')
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise HTTPException(400, f'If-Match is a version such as "7", or *, not {if_match[:40]!r}.')
    return int(text)


def _who(request: Request) -> str:
    """Return who asks: an address, and a name if one is given."""
    address = request.client.host if request.client else "?"
    name = "".join(filter(str.isprintable, request.headers.get("x-operator", "")))
    return f"{name[:WHO_AT_MOST]} at {address}" if name else address
