"""The section `http` of the settings: where the control plane listens, and who may use it."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from .errors import SettingsError
from .sections import Part, number, path_of
from .sizes import shown

RULE = "a token is 16 to 512 visible ASCII characters without spaces: openssl rand -hex 32"
_TOKEN = re.compile(r"[\x21-\x7e]{16,512}")
_NAME = re.compile(r"[a-z0-9._-]{1,253}")


class Refusal(StrEnum):
    """Why the control plane did not let a request in."""

    HOST = "host"
    """It names no server, or another one."""
    NO_LOGIN = "no_login"
    """It has no token."""
    WRONG_LOGIN = "wrong_login"
    LOGIN_RATE = "login_rate"
    """Too many wrong tokens came from its address."""
    SCOPE = "scope"
    """Its token may only read."""
    ORIGIN = "origin"
    """A web page of another server wants a change."""
    CHANGE_RATE = "change_rate"
    """Too many changes came from its address."""
    SIZE = "size"
    """Its body is too large."""


@dataclass(frozen=True, slots=True)
class HttpTokens:
    """The secrets themselves; None where there is none."""

    change: str | None = field(default=None, repr=False)
    """Reads and changes."""
    read: str | None = field(default=None, repr=False)
    """Only reads."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach what listens on `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_token(key: str, token: str) -> None:
    """Raise SettingsError for a token that is easily guessed, or that no header can carry."""
    if _TOKEN.fullmatch(token) is None:
        raise SettingsError(f"{key}: {RULE} prints one.")


def _token(secret: SecretStr | None) -> SecretStr | None:
    if secret is not None and _TOKEN.fullmatch(secret.get_secret_value()) is None:
        raise ValueError(f"{RULE} prints one")
    return secret


def _address(host: str) -> str:
    try:
        return host if host == "localhost" else str(ipaddress.ip_address(host))
    except ValueError:
        raise ValueError(
            f'"{host}" is not an address: write "127.0.0.1", or "0.0.0.0" for all that this '
            f"machine has"
        ) from None


def _file(value: object) -> Path | None:
    return None if value is None else path_of(value, "/run/secrets/kvtier")


def _names(value: object) -> tuple[str, ...]:
    """Return names from a list, or from one text with commas, as a variable holds them."""
    words = value
    if isinstance(value, str):
        words = value.split(",") if value else []
    if not isinstance(words, list | tuple):
        raise ValueError(f"{shown(value)} is not a list of names, such as [kvtier.internal]")
    return tuple(_one_name(word) for word in words)


def _one_name(word: object) -> str:
    name = str(word).strip().lower()
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        if _NAME.fullmatch(name):
            return name
    raise ValueError(f'{shown(word)} is not a name alone, without scheme and port: "kv.internal"')


TokenFile: TypeAlias = Annotated[Path | None, BeforeValidator(_file)]


class HttpSettings(Part):
    """The control plane."""

    host: Annotated[str, AfterValidator(_address)] = Field(
        "127.0.0.1",
        description="Default 127.0.0.1. Address of the HTTP control plane. Others than loopback "
        "need a token. Change it to ::1 where there is no IPv4, to 0.0.0.0 to be reached from "
        "other machines.",
    )
    port: Annotated[int, BeforeValidator(number), Field(ge=0, le=65535)] = Field(
        9555,
        description="Default 9555. TCP port of the HTTP control plane; 0 takes any free one. "
        "Change it when another program has the port.",
    )
    token: Annotated[SecretStr | None, AfterValidator(_token)] = Field(
        None,
        description="Default none. Token that may read and change; once there is one, every "
        "request but probes needs it. Set it as KVTIER_HTTP__TOKEN, for it is never shown, and a "
        "settings file is.",
    )
    token_file: TokenFile = Field(
        None,
        description="Default none. File that holds the token, which is read at start. Set it "
        "where secrets are mounted.",
    )
    read_token: Annotated[SecretStr | None, AfterValidator(_token)] = Field(
        None,
        description="Default none. Token that may only read. Set it for Prometheus and others who "
        "only watch; without http.token nobody can change anything then.",
    )
    read_token_file: TokenFile = Field(
        None,
        description="Default none. File that holds the token that may only read. Set it as "
        "http.token_file.",
    )
    hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)] = Field(
        (),
        description="Default none. More names that requests may call the server by on a loopback "
        "address; KVTIER_HTTP__HOSTS has commas between them. Set it to the name that a proxy in "
        "front hands on.",
    )

    @property
    def guarded(self) -> bool:
        """Whether there is a token."""
        return any((self.token, self.token_file, self.read_token, self.read_token_file))


def check_http(http: HttpSettings) -> None:
    """Raise SettingsError where values that are each valid do not go together."""
    for key, secret, file in (
        ("http.token", http.token, http.token_file),
        ("http.read_token", http.read_token, http.read_token_file),
    ):
        if secret and file:
            raise SettingsError(f"{key} and {key}_file are both set: leave one of them out.")
    if not is_loopback(http.host) and not http.guarded:
        raise SettingsError(
            f'http.host: "{http.host}" is not a loopback address, and whoever reaches it could use '
            f'it: set http.token_file or KVTIER_HTTP__TOKEN, or write "127.0.0.1".'
        )
