"""The section `quotas` of the settings: what tenants may take, and whose salts are whose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from .accounts import NOBODY, QUOTA_KEYS, TENANTS_AT_MOST
from .sections import Part, QuotaText, Section, not_one_of, path_of
from .sizes import format_size, parse_size, shown

TENANT_CHARACTERS = 128

QuotaMap: TypeAlias = dict[str, dict[str, int]]
"""Quotas by tenant: bytes by `QUOTA_KEYS`."""


def parse_quotas(value: object) -> QuotaMap:
    """Return quotas from a map, or from its text as JSON, which a variable holds.

    Raises ValueError, with what would be right.
    """
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value or "{}")
        except msgspec.DecodeError:
            raise ValueError(
                """this is not JSON: write for example {"acme": {"hard": "8GiB"}}"""
            ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} is not a map, such as {{acme: {{hard: 8GiB}}}}")
    if len(value) > TENANTS_AT_MOST:
        raise ValueError(f"{len(value)} tenants are more than the {TENANTS_AT_MOST} that may be")
    return {tenant_name(tenant): _quota(tenant, quota) for tenant, quota in value.items()}


def tenant_name(value: object) -> str:
    """Return a tenant's name. Raises ValueError for what no request can give."""
    if not isinstance(value, str) or len(value) > TENANT_CHARACTERS or not value.isprintable():
        raise ValueError(
            f"{shown(value)[:40]} is not a tenant: printable text of at most {TENANT_CHARACTERS} "
            f"characters"
        )
    return value


def quota_texts(quotas: QuotaMap) -> QuotaText:
    """Return quotas as a settings file would hold them."""
    return {
        tenant: {key: format_size(size) for key, size in quota.items()}
        for tenant, quota in quotas.items()
    }


def _quota(tenant: str, value: object) -> dict[str, int]:
    name = shown(tenant) if tenant != NOBODY else '"" (nobody)'
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{name} needs limits, such as {{soft: 6GiB, hard: 8GiB}}")
    quota: dict[str, int] = {}
    for key, size in value.items():
        if key not in QUOTA_KEYS:
            raise ValueError(f"{name}: {not_one_of(key, QUOTA_KEYS)}")
        try:
            quota[key] = size if type(size) is int and size > 0 else parse_size(size)
        except ValueError as error:
            raise ValueError(f"{name}: {key}: {error}") from None
    for key, soft in quota.items():
        hard = key.replace("soft", "hard")
        if soft > quota.get(hard, soft):
            raise ValueError(
                f"{name}: {key} ({format_size(soft)}) is above {hard} "
                f"({format_size(quota[hard])}): write it the other way round"
            )
    return quota


def _salts_file(value: object) -> Path | None:
    return None if value is None else path_of(value, "/etc/kvtier/salts.json")


class QuotaSettings(Part):
    """What tenants may take."""

    tenants: Annotated[QuotaMap, BeforeValidator(parse_quotas), NoDecode] = Field(
        {},
        description="Default none. Bytes that each tenant's blocks may take, such as "
        "{acme: {soft: 6GiB, hard: 8GiB}}: soft, hard in all tiers together, and host_soft, "
        "host_hard, disk_soft, disk_hard, redis_soft, redis_hard in one. The tenant * is each one "
        'that is not listed, "" the requests that name none. Set it where one tenant drives out '
        "others' blocks.",
    )
    salts_file: Annotated[Path | None, BeforeValidator(_salts_file)] = Field(
        None,
        description="Default none. File that says which tenant a request with which cache_salt "
        "belongs to, as digests (kvtier quotas salt). Set it where requests have salts and name no "
        "tenant.",
    )

    def plain(self) -> Section:
        """Return the section as a settings file would hold it."""
        return super().plain() | {"tenants": quota_texts(self.tenants)}
