"""Settings that change while the server runs: checked as a whole, applied, written down, audited.

What was changed lies above the file, the environment and the command line, and is kept over a
restart in the state directory. Each change has a version; one that was made for another version is
refused. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from .audit import Audit, Entry
from .config import Settings, changed
from .core import Tier
from .directory import Namespace
from .errors import KVTierError, SettingsError
from .guard import Guard, GuardOptions, Trend, Verdict
from .hierarchy import Hierarchy
from .lower import LowerTier
from .lower_options import LowerOptions
from .lowers import options_of, retune
from .quotas import QuotaKeeper
from .resize import Resizer
from .sections import Value, not_one_of
from .swaps import Swaps
from .waiting import PromotionOptions
from .worth import LoadMode

log = logging.getLogger("kvtier.live")

FORMAT = 1
SETTINGS_FILE = "settings.json"
EFFECT_SECONDS = 60.0
"""After a change, so long until the audit says what followed."""
LOWER_KEYS = (
    "capacity", "policy", "write_mode", "admission", "write_rate", "codec", "failures",
)  # fmt: skip
LIVE = (
    *(f"host.{name}" for name in ("capacity", "policy", "high_watermark", "low_watermark")),
    "host.pin_share",
    *(f"disk.{name}" for name in (*LOWER_KEYS, "keep_free", "slow_seconds")),
    *(f"redis.{name}" for name in (*LOWER_KEYS, "ttl_seconds", "timeout_seconds")),
    "loads.mode",
    "loads.wait_seconds",
    "quotas.tenants",
    "log.level",
)
"""Settings that can change while the server runs."""


class StaleError(KVTierError):
    """The settings have changed since whoever wants to change them has read them."""


class Kept(msgspec.Struct, frozen=True):
    """What the state directory keeps of settings."""

    format: int
    version: int
    changes: dict[str, Value]


@dataclass(frozen=True, slots=True)
class Wish:
    """A change that somebody wants."""

    who: str
    changes: Mapping[str, Value]
    version: int | None = None
    """That it was made for; None for whichever is in force."""
    dry_run: bool = False
    guard: GuardOptions | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """What became of it."""

    version: int
    changes: dict[str, tuple[Value, Value]]
    """By key: from, to. Empty if everything was so already."""
    evict_bytes: dict[str, int]
    """By tier, what has to go for it, as of now."""
    audit: int | None
    """The number of its entry."""


@dataclass(slots=True)
class _Effect:
    """What is to be told of a change later."""

    entry: Entry
    since: float
    evictions: dict[str, int]
    guard: Guard | None


class Live:
    """The settings in force. `clock` counts seconds."""

    def __init__(
        self,
        settings: Settings,
        kept: Kept,
        cache: Hierarchy,
        audit: Audit,
        clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.version = kept.version
        self.kept = dict(kept.changes)
        """What was changed, by key."""
        self.audit = audit
        self.resizer = Resizer(cache)
        self.quotas = QuotaKeeper(cache)
        self.quotas.set(settings.quotas.tenants)
        self.trend = Trend()
        self._cache = cache
        self._file = state_folder(settings) / SETTINGS_FILE
        self._clock = clock
        self._lock = asyncio.Lock()
        self._effects: list[_Effect] = []
        self._swaps = Swaps()
        self._said = False

    async def change(self, wish: Wish) -> Done:
        """Change settings, or say what it would do. Raises SettingsError, StaleError."""
        async with self._lock:
            if wish.version not in (None, self.version):
                raise StaleError(
                    f"The settings have version {self.version}, and the change was made for "
                    f"{wish.version}: read them again."
                )
            return await self._change(wish, "change", None)

    async def reload(self, base: Settings) -> None:
        """Take over what a settings file says now, below what was changed. Raises SettingsError."""
        async with self._lock:
            new = changed(base, self.kept)
            wanted, now = plain(new), plain(self.settings)
            changes = {key: wanted[key] for key in LIVE if wanted[key] != now[key]}
            here, there = _flat(self.settings), _flat(new)
            if rest := [key for key in there if key not in LIVE and there[key] != here[key]]:
                log.warning("other values of %s need a restart", ", ".join(rest))
            before = dict(self.kept)
            await self._change(Wish("SIGHUP", changes), "reload", None)
            self.kept = before
            await self._keep()

    def tick(self) -> None:
        """Take note of the hit ratio; call it each second."""
        asked, hit = self._cache.tenants.below_device()
        self.trend.sample(self._clock(), asked, hit)

    async def follow(self) -> None:
        """Judge guarded changes, and tell what followed others. Call it each second."""
        now = self._clock()
        for effect in list(self._effects):
            if effect.guard is None:
                if now >= effect.since + EFFECT_SECONDS:
                    await self._tell(effect, "")
                continue
            verdict = effect.guard.judge(now)
            if verdict is Verdict.FELL:
                await self._roll_back(effect)
            elif verdict is not Verdict.WATCHING:
                words = "held" if verdict is Verdict.HELD else "too few tokens to say"
                await self._tell(effect, f"guard: {words}")

    async def close(self) -> None:
        """End what is under way."""
        await self._swaps.close()

    # A change.

    async def _change(self, wish: Wish, what: str, of: int | None) -> Done:
        check_live(wish.changes)
        new = changed(self.settings, wish.changes)
        lowers = [(lower, options_of(lower.tier, new)) for lower in self._cache.lowers]
        before, after = plain(self.settings), plain(new)
        changes = {
            key: (before[key], after[key]) for key in wish.changes if before[key] != after[key]
        }
        excess = self._excess(new)
        if wish.dry_run or not changes:
            return Done(self.version, changes, excess, None)
        since, evictions, guard = self._clock(), self._evictions(), None
        if wish.guard is not None:
            guard = Guard(wish.guard, self.trend, since)
        self._apply(new, lowers)
        self.version += 1
        self.kept |= {key: value for key, (_, value) in changes.items()}
        await self._keep()
        note = "" if guard is None else guard.says()
        entry = await self.audit.add(wish.who, what, self.version, changes, of=of, note=note)
        log.info("settings %d by %s: %s", self.version, wish.who, _shown(changes))
        self._effects.append(_Effect(entry, since, evictions, guard))
        return Done(self.version, changes, excess, entry.id)

    def _apply(self, new: Settings, lowers: Sequence[tuple[LowerTier, LowerOptions]]) -> None:
        """Let everything go by other settings from now on. Nothing here can fail half-way."""
        old, self.settings = self.settings, new
        host = self._cache.host
        host.options = replace(
            host.options,
            policy=new.host.policy,
            high_watermark=new.host.high_watermark,
            low_watermark=new.host.low_watermark,
        )
        self._cache.pins.share = new.host.pin_share
        if new.host.capacity != old.host.capacity:
            self.resizer.resize(new.host.capacity)
        if new.host.policy != old.host.policy:
            for pool in host.pools.values():
                self._swaps.begin(pool, new.host.policy)
        for lower, options in lowers:
            retune(lower, options, new)
            self._swaps.begin(lower.index, options.policy)
        if new.quotas.tenants != old.quotas.tenants:
            self.quotas.set(new.quotas.tenants)
        self._cache.promotions.options = PromotionOptions(
            LoadMode(new.loads.mode), new.loads.wait_seconds
        )
        logging.getLogger().setLevel(new.log.level.upper())

    def _excess(self, new: Settings) -> dict[str, int]:
        """Return the bytes of each tier that other capacities leave no room for."""
        host = self._cache.host
        slots = sum(len(space.blocks) * space.pool.slot_bytes for space in self._spaces())
        found = {Tier.HOST.value: slots - new.host.capacity if host.pools else 0}
        for lower in self._cache.lowers:
            section = new.disk if lower.tier is Tier.DISK else new.redis
            found[lower.tier.value] = lower.used_bytes - section.capacity
        quotas = self.quotas.excess(new.quotas.tenants)
        return {tier: max(excess, quotas[Tier(tier)], 0) for tier, excess in found.items()}

    def _spaces(self) -> list[Namespace]:
        return list(self._cache.directory.namespaces.values())

    def _evictions(self) -> dict[str, int]:
        found = {Tier.HOST.value: self._cache.evictor.evictions}
        return found | {lower.tier.value: lower.evictions for lower in self._cache.lowers}

    # What follows.

    async def _roll_back(self, effect: _Effect) -> None:
        """Take a change back, as far as nobody has changed it again since."""
        async with self._lock:
            self._effects.remove(effect)
            now = plain(self.settings)
            changes = effect.entry.changes.items()
            back = {key: before for key, (before, after) in changes if now[key] == after}
            number = effect.entry.id
            try:
                await self._change(Wish("guard", back), "rollback", number)
            except SettingsError as error:  # It does not go with what was changed since.
                note = f"guard: can't be taken back: {error}"
                await self.audit.add("guard", "effect", self.version, of=number, note=note)
                log.error("the hit ratio fell, and entry %d can't be taken back: %s", number, error)
            else:
                log.warning("the hit ratio fell: settings of entry %d are taken back", number)

    async def _tell(self, effect: _Effect, note: str) -> None:
        self._effects.remove(effect)
        now = self._clock()
        window = now - effect.since
        evicted = {
            tier: count - effect.evictions.get(tier, 0) for tier, count in self._evictions().items()
        }
        await self.audit.add(
            effect.entry.who,
            "effect",
            self.version,
            of=effect.entry.id,
            note=note,
            evicted_blocks=evicted,
            hit_ratio_before=self.trend.ratio(effect.since - window, effect.since),
            hit_ratio_after=self.trend.ratio(effect.since, now),
        )

    # Over restarts.

    async def _keep(self) -> None:
        kept = Kept(FORMAT, self.version, self.kept)
        try:
            await asyncio.to_thread(_write, self._file, msgspec.json.encode(kept))
        except OSError as error:
            if not self._said:
                log.warning("changed settings can't be kept in %s: %s", self._file, error)
            self._said = True


def state_folder(settings: Settings) -> Path:
    """Return where this server keeps its state: the socket tells servers of one user apart."""
    digest = hashlib.sha256(str(settings.socket).encode()).hexdigest()
    return settings.state / digest[:12]


def load_kept(base: Settings) -> tuple[Settings, Kept]:
    """Return the settings with what was changed before the restart. Blocks.

    Raises SettingsError if that can't be used any more.
    """
    file = state_folder(base) / SETTINGS_FILE
    advice = "start once with --reset-settings, which forgets all changes"
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=Kept)
    except FileNotFoundError:
        return base, Kept(FORMAT, 1, {})
    except (OSError, msgspec.DecodeError) as error:
        raise SettingsError(f"{file} can't be read ({error}): {advice}.") from None
    if kept.format != FORMAT:
        raise SettingsError(f"{file} has format {kept.format}, not {FORMAT}: {advice}.")
    try:
        check_live(kept.changes)
        return changed(base, kept.changes), kept
    except SettingsError as error:
        reason = str(error).rstrip(".")
        raise SettingsError(f"{file} does not fit any more ({reason}): {advice}.") from None


def forget(settings: Settings) -> None:
    """Forget what was changed while a server ran. Blocks."""
    (state_folder(settings) / SETTINGS_FILE).unlink(missing_ok=True)


def check_live(changes: Mapping[str, Value]) -> None:
    """Raise SettingsError unless all keys are of settings that can change."""
    for key in changes:
        if key not in LIVE:
            raise SettingsError(
                f"{not_one_of(key, LIVE)}. Other settings need a restart."
                if key
                else "A key is empty: write for example host.policy."
            )


def plain(settings: Settings) -> dict[str, Value]:
    """Return the settings that can change by dotted key, as a settings file would hold them."""
    values = _flat(settings)
    found: dict[str, Value] = {}
    for key in LIVE:
        value = values[key]
        assert not isinstance(value, list), "each of these is one value"
        found[key] = value
    return found


def _flat(settings: Settings) -> dict[str, Value | list[str]]:
    """Return all settings by dotted key."""
    found: dict[str, Value | list[str]] = {}
    for name, value in settings.effective().items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return found


def _shown(changes: Mapping[str, tuple[Value, Value]]) -> str:
    return ", ".join(f"{key} {before} to {after}" for key, (before, after) in changes.items())


def _write(file: Path, data: bytes) -> None:
    """Write a file as a whole, so that a crash leaves the old one or the new one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    with part.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    part.replace(file)
