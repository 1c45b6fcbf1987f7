"""HTTP routes of blocks, pins and prefixes: parse, hand to the core, serialise.

Long work goes on in the background, a piece in each turn of the loop, and one walk over a namespace
at a time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, HTTPException, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from .block_readings import (
    DropReading,
    LookupReading,
    PinList,
    PinReading,
    PrefetchReading,
    PrefixList,
)
from .blocks import UnknownNamespace, find_namespace, locate, prefetch
from .core import KEY_BYTES, LOWER_TIERS, BlockKey, Tier
from .directory import Namespace
from .drops import Drop
from .hashing import block_keys, find_seed
from .hierarchy import Hierarchy
from .pins import Pin, PinRefused
from .prefetch import PrefetchRefused
from .prefixes import BadCursor, Order, list_prefixes
from .problems import problems
from .walking import AT_ONCE, Work

T = TypeVar("T")
log = logging.getLogger("kvtier.blocks")

TOKENS_AT_MOST = 131_072
KEYS_AT_MOST = 8_192
TTL_SECONDS_AT_MOST = 30 * 86_400
PIN_NAME_AT_MOST = 64
"""Characters of the name of a pin in a path."""
DROP_SECONDS = 3.0
"""After which a drop is answered with what has gone so far; it goes on."""

Token = Annotated[int, Field(ge=0, lt=2**32, strict=True)]
HexKey = Annotated[str, Field(pattern=rf"^[0-9a-f]{{{2 * KEY_BYTES}}}$")]
DropTier = Literal["all", "host", "disk", "redis"]
Digest = Annotated[
    str | None,
    Field(description="Its digest, or the first 6 digits or more; may be left out if it is alone."),
]


class Prompt(BaseModel):
    """A prompt: its tokens, or the keys of its blocks."""

    model_config = ConfigDict(extra="forbid")

    namespace: Digest = None
    tokens: list[Token] | None = Field(
        None, max_length=TOKENS_AT_MOST, description="The prompt's token ids."
    )
    keys: list[HexKey] | None = Field(
        None, max_length=KEYS_AT_MOST, description="Block keys in hex, head first."
    )
    salt: str | None = Field(None, max_length=1024, description="The request's cache_salt.")
    hash_seed: str | None = Field(
        None, max_length=128, description="The engines' PYTHONHASHSEED, if they have one."
    )


class WholePrompt(Prompt):
    """A prompt that is named."""

    @model_validator(mode="after")
    def _one_of_both(self) -> WholePrompt:
        if (self.tokens is None) == (self.keys is None):
            raise ValueError("give either tokens or keys")
        return self


class DropRequest(Prompt):
    """What to drop: with tokens or keys, the last block of these and all that continues it."""

    tier: DropTier = "all"
    dry_run: bool = False

    @model_validator(mode="after")
    def _a_block_at_most_once(self) -> DropRequest:
        if self.tokens is not None and self.keys is not None:
            raise ValueError("give tokens or keys, or neither for the whole namespace")
        if self.tokens is None and self.keys is None and self.namespace is None:
            raise ValueError("name the namespace that is to be dropped as a whole")
        return self


class PinRequest(WholePrompt):
    """What to pin."""

    ttl_seconds: float = Field(gt=0, le=TTL_SECONDS_AT_MOST)
    name: str = Field("", max_length=128, description="For people.")


def block_router(cache: Hierarchy) -> APIRouter:
    """Return the routes over a hierarchy."""
    router = APIRouter()
    walks = _Walks()
    _add_prompts(router, cache)
    _add_walks(router, cache, walks)
    _add_pins(router, cache)
    return router


def _add_prompts(router: APIRouter, cache: Hierarchy) -> None:
    @router.post("/v1/blocks/lookup", responses=problems(403, 404, 409))
    async def lookup(prompt: WholePrompt) -> LookupReading:
        """Which tiers hold which blocks of a prompt. Counts as no use."""
        space, keys = await _parse(cache, prompt)
        held = await _drive(locate(cache, space, keys))
        tokens = space.manifest.block_tokens
        matched = held.matched
        return LookupReading(
            space.digest, tokens, len(keys), matched, matched * tokens, held.readings()
        )

    @router.post("/v1/blocks/prefetch", status_code=202, responses=problems(403, 404, 409))
    async def begin_prefetch(prompt: WholePrompt) -> PrefetchReading:
        """Bring what lower tiers have of a prompt to the host tier, after waiting requests."""
        space, keys = await _parse(cache, prompt)
        try:
            count = await _drive(prefetch(cache, space, keys))
        except PrefetchRefused as refused:
            raise HTTPException(429, str(refused)) from None
        return PrefetchReading(space.digest, len(keys), count)


def _add_walks(router: APIRouter, cache: Hierarchy, walks: _Walks) -> None:
    @router.post("/v1/blocks/drop", responses=problems(403, 404, 409))
    async def drop(request: DropRequest) -> DropReading:
        """Drop a namespace, or a block with all that continues it. Goes on if it takes long."""
        space = _namespace(cache, request.namespace)
        root: BlockKey | None = None
        if request.tokens is not None or request.keys is not None:
            _, keys = await _parse(cache, request)
            if not keys:
                raise HTTPException(422, "This prompt has no whole block to drop.")
            root = keys[-1]
        one = Drop(cache, space, _tiers(cache, request.tier), root)
        work = one.count() if request.dry_run else one.run()
        done = await walks.within(DROP_SECONDS, work)
        gone = [dataclasses.replace(each) for each in one.gone]
        return DropReading(space.digest, done, request.dry_run, gone)

    @router.get("/v1/prefixes", responses=problems(404))
    async def prefixes(
        namespace: Digest = None,
        tier: Literal["host"] = "host",  # noqa: ARG001  # The others know no chains.
        order: Order = Order.BYTES,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        cursor: str | None = None,
    ) -> PrefixList:
        """The largest or most used prefixes of the host tier, a page at a time."""
        space = _namespace(cache, namespace)
        pinned = [pin.blocks[0].key for pin in cache.pins.of(space)]
        try:
            page = await walks.to_the_end(list_prefixes(space, pinned, order, limit, cursor))
        except BadCursor as bad:
            raise HTTPException(422, str(bad)) from None
        tokens = space.manifest.block_tokens
        return PrefixList(space.digest, tokens, page.total, page.prefixes, page.next)


def _add_pins(router: APIRouter, cache: Hierarchy) -> None:
    @router.get("/v1/pins")
    async def pins() -> PinList:
        """All pins, and what they may take in all."""
        kept = cache.pins
        found = [_reading(cache, pin) for pin in kept]
        return PinList(kept.pinned_bytes, kept.budget_bytes, found)

    @router.post("/v1/pins", status_code=201, responses=problems(403, 404, 409))
    async def add_pin(request: PinRequest) -> PinReading:
        """Keep what the host tier has of a prompt for a time. Ends with the server, or a reset."""
        space, keys = await _parse(cache, request)
        try:
            pin = cache.pins.add(space, keys, request.ttl_seconds, request.name)
        except PinRefused as refused:
            raise HTTPException(409, str(refused)) from None
        return _reading(cache, pin)

    @router.delete("/v1/pins/{pin}", status_code=204, responses=problems(403, 404))
    async def remove_pin(pin: Annotated[str, Path(max_length=PIN_NAME_AT_MOST)]) -> Response:
        """End a pin; its blocks go when they are the coldest."""
        if not cache.pins.remove(pin):
            raise HTTPException(404, f'There is no pin "{pin}": it may have ended by itself.')
        return Response(status_code=204)


class _Walks:
    """Walks over namespaces: one at a time, whoever asks."""

    def __init__(self) -> None:
        self._task: asyncio.Task[object] | None = None

    async def within(self, seconds: float, work: Work[None]) -> bool:
        """Return whether work was done within the time; otherwise it goes on."""
        task = self._begin(work)
        done, _ = await asyncio.wait([task], timeout=seconds)
        if done:
            task.result()
        else:
            task.add_done_callback(_report)
        return bool(done)

    async def to_the_end(self, work: Work[T]) -> T:
        """Return the work's result."""
        return await self._begin(work)

    def _begin(self, work: Work[T]) -> asyncio.Task[T]:
        if self._task is not None and not self._task.done():
            work.close()
            busy = "Another drop or list is under way: ask again in a moment."
            raise HTTPException(429, busy, {"Retry-After": "1"})
        task = asyncio.create_task(_drive(work))
        self._task = task
        return task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a drop ended early", exc_info=error)


async def _drive(work: Work[T]) -> T:
    """Do work in pieces, with turns for others in between."""
    while True:
        try:
            pause = next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(pause)


async def _parse(cache: Hierarchy, prompt: Prompt) -> tuple[Namespace, list[BlockKey]]:
    """Return the namespace and the keys of the prompt's whole blocks. Raises HTTPException."""
    space = _namespace(cache, prompt.namespace)
    if prompt.keys is not None:
        return space, [bytes.fromhex(key) for key in prompt.keys]
    manifest = space.manifest
    seed = find_seed(manifest.hash_seed, prompt.hash_seed)
    if seed is None:
        what = "needs their PYTHONHASHSEED" if prompt.hash_seed is None else "is another one"
        raise HTTPException(
            409,
            f"The engines of this namespace hash with a seed of their own: hash_seed {what}. "
            f"Block keys do without.",
        )
    keys: list[BlockKey] = []
    tokens = prompt.tokens or []
    for key in block_keys(
        manifest.hash_algorithm, seed, tokens, manifest.block_tokens, prompt.salt
    ):
        keys.append(key)
        if not len(keys) % AT_ONCE:
            await asyncio.sleep(0)
    return space, keys


def _namespace(cache: Hierarchy, name: str | None) -> Namespace:
    try:
        return find_namespace(cache, name)
    except UnknownNamespace as unknown:
        raise HTTPException(404, str(unknown)) from None


def _tiers(cache: Hierarchy, tier: DropTier) -> frozenset[Tier]:
    """Return the tiers that are meant. Raises HTTPException if this server has not got them."""
    here = {Tier.HOST, *(lower.tier for lower in cache.lowers)}
    if tier == "all":
        return frozenset(here)
    if Tier(tier) not in here:
        names = ", ".join(one for one in (Tier.HOST, *LOWER_TIERS) if one in here)
        raise HTTPException(404, f'There is no tier "{tier}" here; there is: {names}.')
    return frozenset({Tier(tier)})


def _reading(cache: Hierarchy, pin: Pin) -> PinReading:
    blocks, space = len(pin.blocks), pin.space
    return PinReading(
        id=pin.label,
        name=pin.name,
        namespace=space.digest,
        blocks=blocks,
        bytes=blocks * space.pool.slot_bytes,
        tokens=blocks * space.manifest.block_tokens,
        expires_in_seconds=max(pin.expires - cache.clock(), 0.0),
    )
