"""What one request may ask of the cache: the object "kvtier" in vLLM's `kv_transfer_params`.

Other keys of `kv_transfer_params` belong to other connectors and are not looked at.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import EngineError

PARAM = "kvtier"
TENANT_CHARACTERS = 128


class ControlsError(EngineError):
    """A request asks for something unknown. The message is one sentence for its sender."""


@dataclass(frozen=True, slots=True)
class Controls:
    """What a request asks for; the defaults are those of a request that says nothing."""

    store: bool = True
    """Its blocks may be stored."""
    load: bool = True
    """Its prefix may be loaded."""
    tenant: str = ""
    """Who it is counted for; empty for no one in particular."""
    limit_tokens: int | None = None
    """Nothing beyond so many tokens of it is loaded or stored; None for no limit."""


KEYS = tuple(Controls.__dataclass_fields__)


def read_controls(params: Mapping[str, Any] | None) -> Controls:
    """Return what `kv_transfer_params` ask of kvtier. Raises ControlsError with one sentence."""
    if not isinstance(params, Mapping) or PARAM not in params:
        return Controls()
    asked = params[PARAM]
    if not isinstance(asked, Mapping):
        raise ControlsError(
            f'kv_transfer_params: "{PARAM}" is {_shown(asked)}, and must be an object with keys '
            f"such as {KEYS[0]}"
        )
    for key in asked:
        if key not in KEYS:
            raise ControlsError(_unknown(key))
    default = Controls()
    return Controls(
        _flag("store", asked.get("store", default.store)),
        _flag("load", asked.get("load", default.load)),
        _tenant(asked.get("tenant", default.tenant)),
        _limit(asked["limit_tokens"]) if "limit_tokens" in asked else None,
    )


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(key, f"is {_shown(value)}, and must be true or false")
    return value


def _tenant(value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong("tenant", f"is {_shown(value)}, and must be text")
    if len(value) > TENANT_CHARACTERS:
        at_most = f"may have at most {TENANT_CHARACTERS}"
        raise _wrong("tenant", f"has {len(value)} characters, and {at_most}")
    if not value.isprintable():
        raise _wrong("tenant", "has a character that can't be printed, and must be printable text")
    return value


def _limit(value: Any) -> int:
    if type(value) is not int or value < 0:
        what = f"is {_shown(value)}, and must be a whole number of tokens, 0 or more"
        raise _wrong("limit_tokens", what)
    return value


def _wrong(key: str, what: str) -> ControlsError:
    return ControlsError(f"kv_transfer_params: {PARAM}.{key} {what}")


def _unknown(key: Any) -> str:
    near = difflib.get_close_matches(str(key)[:TENANT_CHARACTERS], KEYS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(KEYS)}"
    return f'kv_transfer_params: "{PARAM}" has an unknown key {_shown(key)}: {hint}'


def _shown(value: Any) -> str:
    """Return a value as the message shows it: short, however large it is."""
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else reprlib.repr(value)
