"""What LMCache's `adapter_params` may say, read strictly."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..client import ClientOptions
from ..config import default_socket
from ..core import Manifest
from ..errors import EngineError
from ..protocol import MAX_TENANT_CHARACTERS

KEYS = (
    "label", "socket", "tenant", "chunk_tokens", "dtype", "verify_loads", "deadline_ms", "wait_ms",
)  # fmt: skip
LABEL_CHARACTERS = 128
MILLISECONDS_AT_MOST = 60_000
CHUNK_TOKENS_AT_MOST = 1 << 20
HELLO_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """How this LMCache server deals with the kvtier server."""

    label: str
    """The same where everything agrees that LMCache's keys leave out, and only there."""
    socket: Path
    tenant: str = "lmcache"
    """Whom its lookups and blocks are counted for."""
    chunk_tokens: int = 256
    """LMCache's `--chunk-size`."""
    dtype: str = ""
    """Of the KV cache: tells compression how wide a number is."""
    verify_loads: bool = False
    """Seal what is stored and check it when it is loaded."""
    deadline_ms: int = 250
    """Longest wait for one answer of the server."""
    wait_ms: int = 6000
    """Longest time for a batch, lower tiers included; the server waits 5 s for these."""

    @property
    def client(self) -> ClientOptions:
        """The client's options."""
        return ClientOptions(self.socket, self.deadline_ms / 1000, HELLO_SECONDS)

    def manifest(self, size: int) -> Manifest:
        """Return the manifest of the namespace for values of `size` bytes."""
        return Manifest(
            model=self.label,
            weights=f"lmcache: {self.label}",
            quantization="unknown",
            dtype=self.dtype,
            kv_dtype="auto",
            block_tokens=self.chunk_tokens,
            layers=1,
            layout="an object of LMCache",
            shard_bytes=size,
            shards=1,
            hash_algorithm="sha256",
            hash_seed="lmcache",
            checksum="xxh3_128" if self.verify_loads else "none",
        )


def read_options(parameters: Mapping[str, object]) -> AdapterOptions:
    """Return the options. Raises EngineError, one sentence with the fix."""
    for key in parameters:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.4)
            hint = f": did you mean {near[0]}?" if near else f": the keys are {', '.join(KEYS)}"
            raise EngineError(f"adapter_params has an unknown key {key!r}{hint}")
    if "label" not in parameters:
        raise EngineError(
            "adapter_params has no label, and LMCache's keys leave out the KV dtype, the layout "
            'and LoRA adapters: add "label" with a text that is the same where the model, its '
            "revision and all of these agree, and only there"
        )
    socket = _text(parameters, "socket", "", 0)
    return AdapterOptions(
        label=_text(parameters, "label", "", LABEL_CHARACTERS),
        socket=Path(socket) if socket else default_socket(),
        tenant=_text(parameters, "tenant", "lmcache", MAX_TENANT_CHARACTERS),
        chunk_tokens=_number(parameters, "chunk_tokens", 256, CHUNK_TOKENS_AT_MOST),
        dtype=_text(parameters, "dtype", "", 0),
        verify_loads=_switch(parameters, "verify_loads"),
        deadline_ms=_number(parameters, "deadline_ms", 250, MILLISECONDS_AT_MOST),
        wait_ms=_number(parameters, "wait_ms", 6000, MILLISECONDS_AT_MOST),
    )


def _text(parameters: Mapping[str, object], key: str, default: str, longest: int) -> str:
    """Return a text; `longest` 0 is for one that may be empty."""
    value = parameters.get(key, default)
    fits = isinstance(value, str) and (not longest or 0 < len(value) <= longest)
    if not fits or not str(value).isprintable():
        limit = f" of 1 to {longest} characters" if longest else ""
        raise EngineError(f"adapter_params: {key} is {value!r}, and must be a text{limit}")
    return str(value)


def _number(parameters: Mapping[str, object], key: str, default: int, most: int) -> int:
    value = parameters.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise EngineError(
            f"adapter_params: {key} is {value!r}, and must be a whole number from 1 to {most}"
        )
    return value


def _switch(parameters: Mapping[str, object], key: str) -> bool:
    value = parameters.get(key, False)
    if not isinstance(value, bool):
        raise EngineError(f"adapter_params: {key} is {value!r}, and must be true or false")
    return value
