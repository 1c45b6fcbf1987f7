"""Who may use the control plane: tokens, the server's names, and how much and how often.

Pure ASGI around the application. Each request is decided on at once, before anything is awaited,
on the loop that owns the state. Every refusal is a problem document. Nothing here keeps a token:
digests under a key of this process are compared, in a time that does not depend on them.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import math
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import Settings
from .http_section import HttpTokens, Refusal, is_loopback
from .metrics import Metrics
from .problems import problem

log = logging.getLogger("kvtier.access")

READS = frozenset({"GET", "HEAD"})
QUESTIONS = frozenset({("POST", "/v1/blocks/lookup")})
"""Requests that change nothing and have a body: whoever may read may ask them."""
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""For probes, which have no token."""
OWN_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
BODY_BYTES_AT_MOST = 1 << 20
ADDRESSES_AT_MOST = 1024
"""Client addresses that a rate is kept of; the one that came last the longest ago is forgotten."""
LOG_SECONDS = 60.0
"""Wrong tokens are logged once in so long."""
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]{2,45})\]|([A-Za-z0-9._-]{1,253}))(?::\d{0,5})?")
_TOO_LARGE = f"A request's body may have {BODY_BYTES_AT_MOST:,} bytes: send less."


class Refused(HTTPException):
    """A request is not let in."""

    def __init__(
        self, reason: Refusal, status: int, detail: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, detail, headers)
        self.reason = reason


class Right(Enum):
    """What a request may do."""

    NOTHING = "nothing"
    READ = "read"
    CHANGE = "change"


@dataclass(frozen=True, slots=True)
class Rate:
    """How often something may happen: `burst` times at once, `per_second` on average."""

    burst: int
    per_second: float


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """What is let in."""

    tokens: HttpTokens = field(default_factory=HttpTokens, repr=False)
    host: str = "127.0.0.1"
    """The address that is listened on."""
    hosts: frozenset[str] = frozenset()
    """More names that the server may be called by."""
    failed_logins: Rate = Rate(10, 1.0)
    changes: Rate = Rate(200, 50.0)


def access_options(settings: Settings) -> AccessOptions:
    """Return what the settings let in. Blocks while it reads files. Raises SettingsError."""
    http = settings.http
    return AccessOptions(settings.http_tokens(), http.host, frozenset(http.hosts))


class Access:
    """The application, for those who may use it."""

    def __init__(
        self,
        app: ASGIApp,
        options: AccessOptions,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._refused = metrics.http_refusals
        self._hosts = options.hosts
        self._clock = clock
        self._tokens = Tokens(options.tokens)
        self._names: frozenset[str] | None = None
        if is_loopback(options.host):
            self._names = OWN_NAMES | options.hosts | {options.host}
        self._failed_logins = Buckets(options.failed_logins)
        self._changes = Buckets(options.changes)
        self._log_after = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
        elif scope["type"] != "http":
            await self._app(scope, receive, send)
        else:
            try:
                self._check(scope, Headers(scope=scope))
            except Refused as refused:
                self._refused.labels(refused.reason).inc()
                status, detail = refused.status_code, refused.detail
                answer = problem(scope["path"], status, detail, refused.headers)
                await answer(scope, receive, send)
            else:
                await self._app(scope, self._bounded(receive), send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raise Refused unless the request may be served."""
        self._check_name(headers)
        _check_size(headers)
        reads = scope["method"] in READS
        if reads and scope["path"] in OPEN_PATHS:
            return
        asks = (scope["method"], scope["path"]) in QUESTIONS
        client, now = _network(scope), self._clock()
        right = self._right(headers, client, now)
        if reads:
            return
        if right is not Right.CHANGE and not asks:
            raise Refused(
                Refusal.SCOPE,
                403,
                "This token may only read: changes need the one of http.token.",
                {"WWW-Authenticate": 'Bearer realm="kvtier", error="insufficient_scope"'},
            )
        self._check_origin(headers)
        wait = self._changes.take(client, now)
        _wait(Refusal.CHANGE_RATE, wait, "Too many changes or questions")

    def _check_name(self, headers: Headers) -> None:
        """A page that a browser shows may call this server by a name of its own (DNS rebinding)."""
        given = headers.getlist("host")
        name = _name(given[0]) if len(given) == 1 else None
        if name is None:
            raise Refused(Refusal.HOST, 400, "A request names its server once, in the Host header.")
        if self._names is not None and name not in self._names:
            raise Refused(
                Refusal.HOST,
                421,
                f'This server is not known as "{name}": http.hosts may name it so.',
            )

    def _check_origin(self, headers: Headers) -> None:
        """A browser sends what a page of another server wants, and says whose page it is."""
        for origin in headers.getlist("origin"):
            place = origin.partition("://")[2]
            if place != headers["host"] and _name(place) not in self._hosts:
                raise Refused(
                    Refusal.ORIGIN,
                    403,
                    "A page of another server wants this change: http.hosts may allow it.",
                )

    def _right(self, headers: Headers, client: str, now: float) -> Right:
        """Return what the sender may do, READ at least. Raises Refused."""
        if not self._tokens.wanted:
            return Right.CHANGE
        given = headers.getlist("authorization")
        if not given:
            said = "This server wants a token: Authorization: Bearer, and the token."
            raise _unauthorised(Refusal.NO_LOGIN, said)
        wait = self._failed_logins.wait(client, now)
        _wait(Refusal.LOGIN_RATE, wait, "Too many wrong tokens")
        right = self._tokens.right(given[0]) if len(given) == 1 else Right.NOTHING
        if right is Right.NOTHING:
            self._failed_logins.take(client, now)
            self._tell(client, now)
            said = "This is not the server's token."
            raise _unauthorised(Refusal.WRONG_LOGIN, said, ', error="invalid_token"')
        return right

    def _bounded(self, receive: Receive) -> Receive:
        """Return a `receive` that raises Refused once a body is too large, whatever it said."""
        left = BODY_BYTES_AT_MOST

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                self._refused.labels(Refusal.SIZE).inc()
                raise _too_large()
            return message

        return counted

    def _tell(self, client: str, now: float) -> None:
        if now >= self._log_after:
            self._log_after = now + LOG_SECONDS
            log.warning("HTTP from %s came with a wrong token", client)


class Tokens:
    """Which token may do what. `wanted`: whether there is any."""

    def __init__(self, tokens: HttpTokens) -> None:
        self.wanted = tokens.change is not None or tokens.read is not None
        self._key = secrets.token_bytes(32)
        self._change = self._digest(tokens.change)
        self._read = self._digest(tokens.read)

    def right(self, authorization: str) -> Right:
        """Return what the sender of this header may do, after the same time for each."""
        scheme, _, token = authorization.partition(" ")
        digest = self._digest(token.strip(" ") if scheme.lower() == "bearer" else None)
        change = secrets.compare_digest(digest, self._change)
        read = secrets.compare_digest(digest, self._read)
        if change:
            return Right.CHANGE
        return Right.READ if read else Right.NOTHING

    def _digest(self, token: str | None) -> bytes:
        if token is None:
            return secrets.token_bytes(32)  # Equal to no other one.
        return hashlib.blake2b(token.encode(), key=self._key, digest_size=32).digest()


class Buckets:
    """A token bucket for each address, kept as the time at which it is full again."""

    def __init__(self, rate: Rate, most: int = ADDRESSES_AT_MOST) -> None:
        self._rate = rate
        self._most = most
        self._full_at: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def wait(self, address: str, now: float) -> float:
        """Return the seconds until there is one to take; 0.0 if there is one."""
        missing = self._full_at.get(address, now) - now
        return max(0.0, missing - (self._rate.burst - 1) / self._rate.per_second)

    def take(self, address: str, now: float) -> float:
        """Take one if there is one, and return what `wait` did."""
        wait = self.wait(address, now)
        if not wait:
            full_at = max(self._full_at.pop(address, now), now) + 1 / self._rate.per_second
            self._full_at[address] = full_at
            if len(self._full_at) > self._most:
                self._full_at.popitem(last=False)
        return wait


def _check_size(headers: Headers) -> None:
    for length in headers.getlist("content-length"):
        digits = length.strip()
        # A number of thousands of digits would take Python long to read.
        if len(digits) > 18 or (digits.isdecimal() and int(digits) > BODY_BYTES_AT_MOST):
            raise _too_large()


def _name(place: str) -> str | None:
    """Return the name in a host with or without a port, or None if there is none."""
    match = _HOST.fullmatch(place)
    if match is None:
        return None
    if match[1] is None:
        return str(match[2]).lower()
    try:
        return str(ipaddress.IPv6Address(match[1]))
    except ValueError:
        return None


def _network(scope: Scope) -> str:
    """Return the client's address; of IPv6 its /64, all of which one client may have."""
    client = scope.get("client")
    host = str(client[0]) if client else ""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def _too_large() -> Refused:
    return Refused(Refusal.SIZE, 413, _TOO_LARGE, {"Connection": "close"})


def _unauthorised(reason: Refusal, detail: str, error: str = "") -> Refused:
    return Refused(reason, 401, detail, {"WWW-Authenticate": f'Bearer realm="kvtier"{error}'})


def _wait(reason: Refusal, seconds: float, what: str) -> None:
    if seconds:
        whole = math.ceil(seconds)
        said = f"{what}: try again in {whole} s."
        raise Refused(reason, 429, said, {"Retry-After": str(whole)})
