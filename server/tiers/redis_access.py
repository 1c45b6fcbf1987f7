"""How to reach Redis: the settings of the tier, its URL, and what of that may be shown."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from ..errors import SettingsError

DEFAULT_PORT = 6379
SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """The settings of the tier."""

    url: str = field(repr=False)
    """`redis://`, `rediss://` or `unix://`. A user and a password in it count where the fields
    below are None. Show it with `shown_url` only."""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    timeout_seconds: float = 0.25
    """The most that any call may take."""
    ttl_seconds: int = 0
    """How long after its last write Redis drops a record. 0: never."""
    ca_file: Path | None = None
    """PEM file with the authorities to trust under `rediss://`, instead of the system's."""
    cluster: bool = False
    connections: int = 4
    """The most connections to one node."""


class Place(NamedTuple):
    """An address. `port` is 0 if `host` is the path of a unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{_bracketed(self.host)}:{self.port}" if self.port else self.host


@dataclass(frozen=True, slots=True)
class Access:
    """How to get in, at any node."""

    tls: ssl.SSLContext | None
    database: int
    login: tuple[bytes, ...] = field(repr=False)
    """The words after AUTH; none where there is no AUTH."""
    connections: int


class _UrlError(ValueError):
    """Its text quotes nothing of the URL."""


def shown_url(url: str) -> str:
    """Return a URL for people: scheme, host, port and database, and nothing else that it has."""
    try:
        parts = urlsplit(url)
        place, database = _address(parts)
    except ValueError:
        return "a URL that cannot be read"
    if not place.port:
        return f"unix://{place}"
    user = "***@" if "@" in parts.netloc else ""
    return f"{parts.scheme}://{user}{place}/{database}"


def parse(options: RedisOptions) -> tuple[Place, Access]:
    """Return what the settings say. Raises SettingsError; its text has no secret."""
    try:
        parts = urlsplit(options.url)
        place, database = _address(parts)
        if options.cluster and (database or not place.port):
            raise _UrlError("a cluster has one database, and no unix socket")
    except _UrlError as error:
        raise SettingsError(f"redis.url: {error}") from None
    except ValueError:
        # The library's text quotes what it could not read, which may be a part of a password.
        raise SettingsError("redis.url: host or port cannot be read") from None
    username = options.username if options.username is not None else _plain(parts.username)
    password = options.password if options.password is not None else _plain(parts.password)
    return place, Access(
        _context(options.ca_file) if parts.scheme == "rediss" else None,
        database,
        _login(username, password),
        options.connections,
    )


def _address(parts: SplitResult) -> tuple[Place, int]:
    if parts.scheme not in SCHEMES:
        raise _UrlError("it must begin with redis://, rediss:// or unix://")
    if parts.fragment:
        raise _UrlError("it has a '#': write that in a password as %23")
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.startswith("/"):
            raise _UrlError("unix:// needs a path from the root, as in unix:///run/redis.sock")
        queries = parse_qs(parts.query, strict_parsing=bool(parts.query))
        if set(queries) - {"db"}:
            raise _UrlError("after '?' there may be db only")
        return Place(unquote(parts.path), 0), _database(queries.get("db", ["0"])[0])
    if parts.query:
        raise _UrlError("it may have nothing after a '?'")
    if not parts.hostname:
        raise _UrlError("it has no host")
    return Place(parts.hostname, parts.port or DEFAULT_PORT), _database(parts.path.strip("/"))


def _database(text: str) -> int:
    if text and not text.isdecimal():
        raise _UrlError("the database must be a number, as in redis://localhost:6379/0")
    return int(text or 0)


def _login(username: str | None, password: str | None) -> tuple[bytes, ...]:
    if username:
        return username.encode(), (password or "").encode()
    return (password.encode(),) if password else ()


def _context(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        text = f"redis.ca_file: {ca_file} cannot be used: {error.strerror or error}"
        raise SettingsError(text) from None


def _plain(part: str | None) -> str | None:
    return None if part is None else unquote(part)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
