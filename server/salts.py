"""Salts of requests, and the tenants that they belong to: a file of digests.

Only who has a salt can make its digest, and only with the file's key can anybody try what a salt
may be. Engines get the key when they connect, and send digests: a salt itself never leaves its
engine. Reading and writing block.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from .accounts import NOBODY
from .errors import SettingsError
from .protocol import SALT_DIGEST_BYTES, SALT_MARK, salted
from .quota_section import tenant_name

FORMAT = 1
KEY_BYTES = 32
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * SALT_DIGEST_BYTES}}}")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    key: str
    salts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Salts:
    """Tenants by the digests of their salts. `key` is empty where there is no file."""

    key: bytes = field(default=b"", repr=False)
    tenants: dict[str, str] = field(default_factory=dict, repr=False)

    def tenant(self, told: str) -> str:
        """Return whose request it is by what an engine told; an unknown salt is nobody's."""
        if told[:1] != SALT_MARK:
            return told
        return self.tenants.get(told[1:], NOBODY)


def load_salts(file: Path | None) -> Salts:
    """Return what a file holds; without one, nothing. Raises SettingsError, with none of it."""
    if file is None:
        return Salts()
    try:
        found = msgspec.json.decode(file.read_bytes(), type=_File)
        key = bytes.fromhex(found.key)
        names = {digest: tenant_name(tenant) for digest, tenant in found.salts.items()}
    except OSError as error:
        raise SettingsError(
            f"quotas.salts_file ({file}) can't be read: {error.strerror}. Let this user read it."
        ) from None
    except (msgspec.DecodeError, ValueError):
        raise _not_ours(file) from None
    whole = found.format == FORMAT and len(key) == KEY_BYTES
    if not whole or not all(map(_DIGEST.fullmatch, names)):
        raise _not_ours(file)
    return Salts(key, names)


def add_salt(file: Path, salt: str, tenant: str) -> str:
    """Write down whose a salt is, and return its digest. Makes the file. Raises SettingsError."""
    if not salt:
        raise SettingsError("There is no salt on standard input.")
    try:
        name = tenant_name(tenant)
    except ValueError as error:
        raise SettingsError(f"{error}.") from None
    salts = load_salts(file) if file.exists() else Salts(secrets.token_bytes(KEY_BYTES))
    digest = salted(salts.key, salt).removeprefix(SALT_MARK)
    content = _File(FORMAT, salts.key.hex(), salts.tenants | {digest: name})
    try:
        _write(file, msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    except OSError as error:
        raise SettingsError(f"{file} can't be written: {error.strerror}.") from None
    return digest


def _write(file: Path, data: bytes) -> None:
    """Write a file as a whole, readable to its owner alone."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(data)
    part.replace(file)


def _not_ours(file: Path) -> SettingsError:
    return SettingsError(
        f"quotas.salts_file ({file}) is not a file of salts: make one with kvtier quotas salt."
    )
