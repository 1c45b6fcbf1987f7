"""The sections of the settings: their keys, defaults, descriptions, and what each value may be.

Reads neither file nor environment: that is `config.py`'s business.
"""

from __future__ import annotations

import difflib
import grp
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr

from .policies import POLICIES
from .sizes import format_size, parse_size, shown

Scalar: TypeAlias = str | int | float | None
QuotaText: TypeAlias = dict[str, dict[str, str]]
"""Quotas by tenant, as sizes with units."""
Value: TypeAlias = Scalar | QuotaText
"""Of a setting that can change while the server runs."""
Section: TypeAlias = dict[str, Value | list[str]]


def number(value: object) -> object:
    """YAML's `yes` and `true` are numbers to pydantic, but nobody means port 1 by them."""
    if isinstance(value, bool):
        raise ValueError(f"{shown(value)} is not a number")
    return value


def _known_policy(name: str) -> str:
    if name not in POLICIES:
        raise ValueError(not_one_of(name, POLICIES))
    return name


def known_group(name: str | None) -> str | None:
    if name is not None:
        try:
            grp.getgrnam(name)
        except KeyError:
            raise ValueError(f'there is no group "{name}" here: name one of /etc/group') from None
    return name


def socket_path(value: object) -> Path:
    return path_of(value, "/run/kvtier/kvtier.sock")


def state_path(value: object) -> Path:
    return path_of(value, "/var/lib/kvtier")


def _directory(value: object) -> Path | None:
    return None if value is None else path_of(value, "/var/cache/kvtier")


def _file(value: object) -> Path | None:
    return None if value is None else path_of(value, "/run/secrets/redis")


def path_of(value: object, example: str) -> Path:
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ValueError(f"{shown(value)} is not a path, such as {example}")
    return Path(value).expanduser().absolute()


def _truth(value: object) -> bool:
    words = {"true": True, "false": False}
    if isinstance(value, bool):
        return value
    if str(value).lower() not in words:
        raise ValueError(f"{shown(value)} is neither true nor false")
    return words[str(value).lower()]


def _redis_url(url: str | None) -> str | None:
    if url is None:
        return None
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("this is no URL: write for example redis://127.0.0.1:6379/0") from None
    if parts.password is not None:
        raise ValueError(
            "a password in the URL is shown wherever the URL is: leave it out, and set "
            "redis.password_file or KVTIER_REDIS__PASSWORD"
        )
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ValueError(
            f"{shown(parts.scheme)} is none of redis, rediss and unix, such as in "
            f'"redis://127.0.0.1:6379/0"'
        )
    return url


_SIZES = ("capacity", "keep_free", "write_rate")


def _optional_size(value: object) -> int | None:
    return None if value is None else parse_size(value)


PolicyName: TypeAlias = Annotated[str, AfterValidator(_known_policy)]
WriteModeName: TypeAlias = Literal["through", "on_reuse", "on_evict"]
AdmissionName: TypeAlias = Literal["always", "second_hit", "learned", "cost"]
CodecName: TypeAlias = Literal["none", "always", "auto"]
Size: TypeAlias = Annotated[int, BeforeValidator(parse_size)]
WriteRate: TypeAlias = Annotated[int | None, BeforeValidator(_optional_size)]
Ratio: TypeAlias = Annotated[float, BeforeValidator(number), Field(gt=0, le=1)]


class Part(BaseModel):
    """A section, or all of them together."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)

    def plain(self) -> Section:
        """Return the section as a settings file would hold it: sizes with units, no secrets."""
        plain: Section = {}
        for name, value in self:
            if name in _SIZES and value is not None:
                plain[name] = format_size(value)
            elif isinstance(value, Path | SecretStr):
                plain[name] = str(value)
            elif isinstance(value, tuple):
                plain[name] = list(value)
            else:
                plain[name] = value
        return plain


class HostSettings(Part):
    """The host tier (L1)."""

    capacity: Size = Field(
        4 * 2**30,
        description="Default 4GiB. Bytes of host memory for blocks, in total: shared by all "
        "engines and workers of this machine, and taken at start. Raise it to keep more prefixes; "
        "leave room for the engines.",
    )
    policy: PolicyName = Field(
        "auto",
        description="Default auto. Names the blocks that leave first when the tier is full. "
        f"One of: {', '.join(POLICIES)}. Change it where kvtier replay shows a better one.",
    )
    high_watermark: Ratio = Field(
        0.98,
        description="Default 0.98. Share of the capacity above which blocks are evicted. Lower it "
        "when engines report stores without a slot (no_slot) in bursts.",
    )
    low_watermark: Ratio = Field(
        0.95,
        description="Default 0.95. Share of the capacity at which an eviction run stops. Lower it "
        "for fewer, longer runs; it must stay below high_watermark.",
    )
    pin_share: Annotated[float, BeforeValidator(number), Field(ge=0, le=0.9)] = Field(
        0.25,
        description="Default 0.25. Share of the capacity that pins may keep, at most 0.9; 0 for "
        "none. Raise it where most of the traffic shares a few known prefixes.",
    )
    huge_pages: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Default auto. Whether slabs lie in huge pages: auto takes them where the "
        "kernel has them, always refuses to start without, never does not ask. Change it to "
        "always where huge pages are reserved for kvtier.",
    )


class DiskSettings(Part):
    """The disk tier (L2)."""

    path: Annotated[Path | None, BeforeValidator(_directory)] = Field(
        None,
        description="Default none: no disk tier (kvtier up: $XDG_CACHE_HOME/kvtier/blocks, or the "
        "same under ~/.cache). Directory for blocks; several servers may share one. Set it to keep "
        "blocks over a restart.",
    )
    capacity: Size = Field(
        20 * 2**30,
        description="Default 20GiB. Bytes on disk for blocks, in all, whoever wrote them there. "
        "Raise it to keep more prefixes.",
    )
    keep_free: Size = Field(
        2**30,
        description="Default 1GiB. What stays free of the file system, whatever capacity says. "
        "Raise it where others need the room.",
    )
    policy: PolicyName = Field(
        "mq",
        description="Default mq. Names the blocks that leave first when the tier is full. "
        f"One of: {', '.join(POLICIES)}. Change it where kvtier replay shows a better one.",
    )
    write_mode: WriteModeName = Field(
        "through",
        description="Default through. When a block is written: when an engine stored it, when it "
        "is used again, or when the host tier evicts it. Change it to on_reuse where writes are "
        "dear, to on_evict for more hits where blocks need not survive a crash.",
    )
    admission: AdmissionName = Field(
        "learned",
        description="Default learned. Which blocks are written: those of kinds that come to be "
        "wanted again, those used by two requests (second_hit), those that save more time than "
        "they take (cost), or always all. Change it to always for a disk that takes any amount "
        "of writes.",
    )
    write_rate: WriteRate = Field(
        None,
        description="Default none: no limit. Bytes a second that are written at most, on average, "
        "such as 50MiB. Set it for a disk that wears out.",
    )
    codec: CodecName = Field(
        "none",
        description="Default none. Whether blocks are compressed, without loss: never, always, or "
        "where they are measured to come back sooner for it. Change it to auto for a slow disk, "
        "to always for a small one; both need kvtier[compression].",
    )
    slow_seconds: Annotated[float, BeforeValidator(number), Field(gt=0, le=60)] = Field(
        2.0,
        description="Default 2. A read or write that takes longer counts as a failure. Raise it "
        "for a network file system that is slow now and then.",
    )
    failures: Annotated[int, BeforeValidator(number), Field(ge=1, le=1000)] = Field(
        3,
        description="Default 3. Failures in a row after which the tier is left alone for a while. "
        "Raise it where single failures are normal.",
    )
    threads: Annotated[int, BeforeValidator(number), Field(ge=2, le=64)] = Field(
        4,
        description="Default 4. Files that are read and written at once; one of the threads only "
        "reads. Raise it for disks that are quicker with more.",
    )


class RedisSettings(Part):
    """The Redis tier (L2)."""

    url: Annotated[str | None, AfterValidator(_redis_url)] = Field(
        None,
        description="Default none: no Redis tier. Redis, Valkey or Redis Cluster that hosts share, "
        "such as redis://cache.internal:6379/0, rediss:// for TLS, or unix:///run/redis.sock. "
        "Set it to share blocks between hosts.",
    )
    username: str | None = Field(
        None,
        description="Default none. ACL user. Set it where Redis has users.",
    )
    password: SecretStr | None = Field(
        None,
        description="Default none. Password; set it as KVTIER_REDIS__PASSWORD, for it is never "
        "shown, and a settings file is.",
    )
    password_file: Annotated[Path | None, BeforeValidator(_file)] = Field(
        None,
        description="Default none. File that holds the password, which is read at start. Set it "
        "where secrets are mounted.",
    )
    ca_file: Annotated[Path | None, BeforeValidator(_file)] = Field(
        None,
        description="Default none: the system's. Certificates that sign Redis's own, for "
        "rediss://. Set it for a private authority.",
    )
    cluster: Annotated[bool, BeforeValidator(_truth)] = Field(
        False,
        description="Default false. Whether the URL is of one node of a Redis Cluster.",
    )
    capacity: Size = Field(
        20 * 2**30,
        description="Default 20GiB. Bytes in Redis of what this server wrote. The capacities of "
        "all servers together should stay below Redis's maxmemory.",
    )
    ttl_seconds: Annotated[int, BeforeValidator(number), Field(ge=0)] = Field(
        7 * 86400,
        description="Default 604800, a week. When Redis drops a block, counted from its last "
        "write; 0 for never. Lower it where servers come and go and nobody evicts what they left.",
    )
    timeout_seconds: Annotated[float, BeforeValidator(number), Field(gt=0, le=30)] = Field(
        0.25,
        description="Default 0.25. Longest time for one call. Raise it for Redis far away, or "
        "blocks of many MB.",
    )
    policy: PolicyName = Field(
        "mq",
        description="Default mq. Names the blocks of this server that leave first. "
        f"One of: {', '.join(POLICIES)}.",
    )
    write_mode: WriteModeName = Field(
        "through",
        description="Default through. As disk.write_mode.",
    )
    admission: AdmissionName = Field(
        "always",
        description="Default always. As disk.admission, which knows what this server's engines "
        "want again, but not other hosts'. Change it to learned where Redis is not shared.",
    )
    write_rate: WriteRate = Field(
        None,
        description="Default none. As disk.write_rate. Set it where others need the network.",
    )
    codec: CodecName = Field(
        "none",
        description="Default none. As disk.codec. Change it to auto for a slow network, to always "
        "where Redis has little memory.",
    )
    failures: Annotated[int, BeforeValidator(number), Field(ge=1, le=1000)] = Field(
        3,
        description="Default 3. As disk.failures; a call that takes timeout_seconds is one.",
    )
    connections: Annotated[int, BeforeValidator(number), Field(ge=2, le=64)] = Field(
        4,
        description="Default 4. Connections that read and write at once; one of them only reads. "
        "Raise it for a fast network.",
    )


class LoadSettings(Part):
    """When blocks of lower tiers are loaded."""

    mode: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Default auto. Whether blocks of the disk and Redis tiers are loaded: auto "
        "where that is measured to be sooner than computing them, always, or never.",
    )
    wait_seconds: Annotated[float, BeforeValidator(number), Field(gt=0, le=600)] = Field(
        5.0,
        description="Default 5. Longest time that a request waits for lower tiers; it gets what "
        "has come by then, and computes the rest. Raise it for prefixes of many GB.",
    )


class RecordingSettings(Part):
    """What is kept of lookups, for `kvtier replay`."""

    path: Annotated[Path | None, BeforeValidator(_directory)] = Field(
        None,
        description="Default none: nothing is recorded. Directory for recordings of lookups: "
        "hashes, lengths and times, no tokens. Set it to find out what other sizes, policies "
        "and admissions would do with your traffic.",
    )
    capacity: Annotated[Size, Field(ge=2**20)] = Field(
        256 * 2**20,
        description="Default 256MiB. Bytes of recordings, of which the oldest go first. Raise it "
        "to look further back.",
    )


class LogSettings(Part):
    """What the server writes to stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="Default info. Least severe level that is logged. Change it to debug to "
        "follow sessions one by one.",
    )


def not_one_of(value: object, names: Iterable[str]) -> str:
    """Say that `value` is none of `names`, and which is the nearest."""
    names = list(names)
    close = difflib.get_close_matches(str(value).lower(), names, 1, 0)
    return f"{shown(value)} is not one of {', '.join(names)}; the nearest is {close[0]}"
