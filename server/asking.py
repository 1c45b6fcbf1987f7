"""Asking a running server over HTTP, for the commands. Everything here blocks."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from .config import DEFAULT_URL, client_token
from .errors import KVTierError

TIMEOUT_SECONDS = 5
ANSWER_BYTES_AT_MOST = 16 << 20

T = TypeVar("T")


class Answer(NamedTuple):
    """What a server said. `json` is None for an empty answer."""

    status: int
    headers: Mapping[str, str]
    json: object


class AskError(KVTierError):
    """A server can't be asked, or refuses. `status` is HTTP's, or 0 if there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def login(token_file: Path | None = None) -> dict[str, str]:
    """Return the headers with the token of `token_file`, else of KVTIER_TOKEN, if there is one.

    Raises SettingsError.
    """
    token = client_token(token_file)
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def ask(
    url: str,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a request to the server at `url`, with a body as JSON unless it is None.

    Sends KVTIER_TOKEN unless `headers` have another Authorization. Raises AskError, whose sentence
    has the server's own words where it refuses.
    """
    parts = _parts(url)
    given = dict(headers or {})
    if "Authorization" not in given:
        given |= login()
    data = None
    if body is not None:
        given["Content-Type"] = "application/json"
        data = msgspec.json.encode(body)
    connection = _connection(parts)
    try:
        connection.request(method, parts.path.rstrip("/") + path, data, given)
        answer = connection.getresponse()
        content = answer.read(ANSWER_BYTES_AT_MOST + 1)
    except http.client.HTTPException as error:
        raise not_ours(url, type(error).__name__) from error
    except OSError as error:
        raise AskError(
            f"No kvtier server answers at {url} ({error}): start one with `kvtier serve`, or name "
            f"its HTTP address with --url."
        ) from error
    finally:
        connection.close()
    return _read(url, answer, content)


@dataclass(frozen=True, slots=True)
class Server:
    """A server, and the file of its token; None is for KVTIER_TOKEN."""

    url: str
    token_file: Path | None = None

    def ask(
        self, kind: type[T], method: str, path: str, body: object = None, if_match: str = ""
    ) -> T:
        """Return an answer as `kind`. Blocks. Raises AskError, SettingsError."""
        headers = login(self.token_file) | ({"If-Match": if_match} if if_match else {})
        try:
            return msgspec.convert(ask(self.url, method, path, body, headers).json, kind)
        except msgspec.ValidationError as error:
            raise not_ours(self.url, str(error)) from error


def read(url: str, path: str, kind: type[T], headers: Mapping[str, str]) -> T:
    """Return what a GET gives, as `kind`. Blocks. Raises AskError."""
    try:
        return msgspec.convert(ask(url, "GET", path, headers=headers).json, kind)
    except AskError as error:
        if error.status != 404:
            raise
        raise not_ours(url, f"it does not know {path}") from error
    except msgspec.ValidationError as error:
        raise not_ours(url, str(error)) from error


def not_ours(url: str, why: str) -> AskError:
    """Return the error of a URL behind which there is something else."""
    return AskError(
        f"What answers at {url} is not a kvtier server of this version ({why}): name the server's "
        f"HTTP address with --url."
    )


def _parts(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port_is_one = parts.port != 0
    except ValueError:
        parts, port_is_one = SplitResult("", "", "", "", ""), False
    if "@" in parts.netloc:
        raise AskError("A user or password in --url is shown with it: set KVTIER_TOKEN instead.")
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_one:
        raise AskError(f'"{url}" is not a URL: write for example {DEFAULT_URL}.')
    return parts


def _connection(parts: SplitResult) -> http.client.HTTPConnection:
    # Without proxies and redirects: the token is for this server only.
    assert parts.hostname is not None, "looked at before"
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=TIMEOUT_SECONDS)


def _read(url: str, answer: http.client.HTTPResponse, content: bytes) -> Answer:
    if len(content) > ANSWER_BYTES_AT_MOST:
        raise not_ours(url, f"more than {ANSWER_BYTES_AT_MOST:,} bytes")
    try:
        found: object = msgspec.json.decode(content) if content else None
    except msgspec.DecodeError as error:
        raise not_ours(url, f"{answer.status}, and {error}") from error
    if answer.status < 300:
        return Answer(answer.status, dict(answer.headers), found)
    detail = found.get("detail") if isinstance(found, dict) else None
    if not isinstance(detail, str):
        raise not_ours(url, str(answer.status))
    if answer.status == 401:
        detail = f"{detail.rstrip('.')}: set KVTIER_TOKEN, or name its file with --token-file."
    raise AskError(f"{url}: {detail}", answer.status)
