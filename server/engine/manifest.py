"""Which engines may share: checks at start, and the namespace manifest.

Both halves of the connector make the manifest from the same inputs; the scheduler side gets the
layout, which only workers see, through vLLM's connector handshake.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cbor2
import vllm
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, iter_layer_specs

from ..core import KEY_BYTES, SHARED_HASHES, Manifest
from ..errors import EngineError

TESTED_VLLM = ("0.32.0", "0.33")
"""From the first version on, below the second."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES_A_FILE = 32
SAMPLE_BYTES = 1 << 16


@dataclass
class WorkerLayout(KVConnectorHandshakeMetadata):
    """What one worker found in its KV caches: bytes of one block, their order, the layers."""

    shard_bytes: int
    layout: str
    layers: int
    asynchronous: bool
    """Loads go on beside the model."""


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise EngineError, one sentence with the fix, if this engine cannot use kvtier."""
    check_version(vllm.__version__)
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    check_hash(cache.prefix_caching_hash_algo)
    if parallel.pipeline_parallel_size > 1:
        raise EngineError(
            "kvtier does not support pipeline parallelism yet: start vLLM with "
            "--pipeline-parallel-size 1"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise EngineError(
            "kvtier does not support context parallelism yet: start vLLM with "
            "--decode-context-parallel-size 1 and --prefill-context-parallel-size 1"
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise EngineError(
            "KV scales that an engine calculates as it runs belong to that engine alone, so its "
            "blocks cannot be shared: start vLLM without --calculate-kv-scales"
        )
    check_groups(kv_cache_config, cache.block_size)


def check_version(version: str) -> None:
    """Raise EngineError if vLLM is outside the tested range."""
    first, end = TESTED_VLLM
    release = _release(version)
    if release is None or not _release(first) <= release < _release(end):  # type: ignore[operator]
        raise EngineError(
            f"this kvtier is tested with vLLM {first} up to, not including, {end}, and this is "
            f"vLLM {version}: install a version in that range, or a kvtier made for this one"
        )


def check_hash(algorithm: str) -> None:
    """Raise EngineError if block hashes of `algorithm` cannot be shared, or are not what it says.

    The function in use is held against an independent digest: a weak or shortened hash would let
    two different blocks share a key, and one request get another's KV.
    """
    use = f"start vLLM with --prefix-caching-hash-algo {SHARED_HASHES[-1]}"
    if algorithm not in SHARED_HASHES:
        raise EngineError(
            f"block hashes of {algorithm!r} can be made to collide, or differ in each process, "
            f"so kvtier does not share them: {use}"
        )
    probe = ("kvtier", (1, 2, 3), None)
    found = get_hash_fn_by_name(algorithm)(probe)
    whole = len(found) == KEY_BYTES
    if algorithm == "sha256_cbor":
        whole = found == hashlib.sha256(cbor2.dumps(probe, canonical=True)).digest()
    if not whole:
        raise EngineError(
            f"vLLM's {algorithm} gives {len(found)} bytes that are not the sha256 it names, so "
            f"different blocks might share a key: {use} of an unchanged vLLM"
        )


def check_groups(kv_cache_config: Any, block_size: int) -> None:
    """Raise EngineError unless all layers are one group of full attention."""
    groups = kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    other = sorted(
        {type(spec).__name__ for spec in specs if type(spec) not in _SUPPORTED or spec.non_causal}
    )
    if other or len(groups) != 1:
        kinds = ", ".join(other) or f"{len(groups)} KV cache groups"
        raise EngineError(
            f"this model has {kinds}, and kvtier supports models whose layers are all full "
            f"attention in one group: run it without kvtier for now"
        )
    if kv_cache_config.hash_block_size not in (None, block_size):
        raise EngineError(
            f"vLLM hashes {kv_cache_config.hash_block_size} tokens at a time and its blocks have "
            f"{block_size}: start it with equal sizes"
        )


def kv_replicas(vllm_config: Any) -> int:
    """Return how many neighbouring ranks hold the same KV heads: all of them for MLA.

    Where layers differ in their heads, each rank counts as one: what is equal is stored twice.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = int(parallel.tensor_parallel_size)
    if model.use_mla:
        return ranks
    heads, each = model.get_total_num_kv_heads(), model.get_num_kv_heads(parallel)
    held = ranks * each
    return held // heads if isinstance(heads, int) and held % heads == 0 else 1


def make_manifest(vllm_config: Any, layout: WorkerLayout, checksum: str) -> Manifest:
    """Return the manifest of the namespace that this engine shares with its equals."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = cache.prefix_caching_hash_algo
    seed = resolve_none_hash_seed(get_hash_fn_by_name(algorithm))
    return Manifest(
        model=Path(str(model.model)).name,
        weights=weights_fingerprint(vllm_config),
        quantization=str(model.quantization),
        dtype=str(model.dtype),
        kv_dtype=str(cache.cache_dtype),
        block_tokens=cache.block_size,
        layers=layout.layers,
        layout=layout.layout,
        shard_bytes=layout.shard_bytes,
        shards=vllm_config.parallel_config.tensor_parallel_size // kv_replicas(vllm_config),
        hash_algorithm=algorithm,
        hash_seed=hashlib.sha256(seed.encode()).hexdigest()[:16],
        checksum=checksum,
    )


def weights_fingerprint(vllm_config: Any) -> str:
    """Return a digest of the model's configuration as run, and of its weights.

    Of each weight file: name, size, and samples spread over its length, so that another fine-tune
    under the same name is another namespace. A model that is not on this disk as files counts by
    name, revision and how it is loaded.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    digest = hashlib.sha256()
    running = json.dumps(model.hf_config.to_dict(), sort_keys=True, default=str)
    how = [running, str(load.load_format), str(model.seed if load.load_format == "dummy" else "")]
    digest.update("\0".join(how).encode())
    files = _weight_files(str(model.model), model.revision)
    if not files:
        digest.update(f"{model.model}\0{model.revision}".encode())
    for file in files:
        _sample(file, digest)
    return digest.hexdigest()


def _weight_files(model: str, revision: str | None) -> list[Path]:
    path = Path(model)
    if path.is_file():
        return [path]
    if not path.is_dir():
        path = _snapshot(model, revision) or path
    return sorted(file for file in path.glob("**/*") if file.suffix in WEIGHT_SUFFIXES)


def _snapshot(model: str, revision: str | None) -> Path | None:
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def _sample(file: Path, digest: Any) -> None:
    size = file.stat().st_size
    digest.update(f"\0{file.name}\0{size}\0".encode())
    last = max(size - SAMPLE_BYTES, 0)
    with file.open("rb") as stream:
        for number in range(SAMPLES_A_FILE):
            stream.seek(last * number // (SAMPLES_A_FILE - 1))
            digest.update(stream.read(SAMPLE_BYTES))


def _release(version: str) -> tuple[int, ...] | None:
    numbers = version.split("+", 1)[0].split(".")[:2]
    if len(numbers) < 2 or not all(number.isdecimal() for number in numbers):
        return None
    return tuple(int(number) for number in numbers)


_SUPPORTED = (FullAttentionSpec, MLAAttentionSpec)
