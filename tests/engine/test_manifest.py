"""Who may share: refusals at start, and what makes two engines the same namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.distributed")

import torch
from kvtier.core import KEY_BYTES
from kvtier.engine import manifest as m
from kvtier.engine.options import read_options
from kvtier.errors import EngineError
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

pytestmark = pytest.mark.vllm

KEYS_OF_A_PROMPT = """
import json
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils as k
found = {}
for algorithm in ("sha256", "sha256_cbor"):
    hashed = get_hash_fn_by_name(algorithm)
    k.init_none_hash(hashed)
    keys, parent = [], None
    for at in range(4):
        parent = k.hash_block_tokens(hashed, parent, range(at * 16, at * 16 + 16), None)
        keys.append(parent.hex())
    found[algorithm] = [k.get_none_hash_seed(), keys]
print(json.dumps(found))
"""


def start_fresh_process(seed):
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    return subprocess.Popen(
        [sys.executable, "-c", KEYS_OF_A_PROMPT],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def test_processes_with_one_seed_have_the_same_keys():
    """A seed of its own (PYTHONHASHSEED) is a namespace of its own: never a silent miss."""
    processes = [start_fresh_process(seed) for seed in (None, None, "0", "1")]
    found = [json.loads(p.communicate(timeout=300)[0].splitlines()[-1]) for p in processes]
    for algorithm in ("sha256", "sha256_cbor"):
        runs = [each[algorithm] for each in found]
        assert runs[0] == runs[1]
        assert len({seed for seed, _ in runs}) == 3
        assert len({tuple(keys) for _, keys in runs}) == 3
        assert all(len(bytes.fromhex(key)) == KEY_BYTES for _, keys in runs for key in keys)


@pytest.mark.parametrize("seed", [None, "0", "1"])
def test_the_manifest_follows_the_seed(seed, monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    plain = m.make_manifest(engine(tmp_path), LAYOUT, "none")
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    assert (m.make_manifest(engine(tmp_path), LAYOUT, "none") == plain) is (seed is None)


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor", "builtin", "md5", ""])
def test_a_hash_that_can_collide_is_refused_with_the_fix(algorithm):
    with pytest.raises(EngineError, match="--prefix-caching-hash-algo sha256_cbor"):
        m.check_hash(algorithm)


@pytest.mark.parametrize(
    "weak", [lambda _: b"\x07" + bytes(31), lambda _: b"short", lambda _: bytes(33)]
)
def test_a_hash_function_cut_short_is_refused(monkeypatch, weak):
    """With 8 bits left of it, two different blocks would share a key in every tier."""
    monkeypatch.setattr(m, "get_hash_fn_by_name", lambda _: weak)
    with pytest.raises(EngineError, match="not the sha256"):
        m.check_hash("sha256_cbor")


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_the_hashes_that_vllm_ships_pass(algorithm):
    m.check_hash(algorithm)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "0.9", "dev", "0.33.0rc1"])
def test_an_untested_vllm_is_refused_naming_the_range(version):
    with pytest.raises(EngineError, match=r"0\.32\.0 up to, not including, 0\.33"):
        m.check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.1+cpu"])
def test_a_tested_vllm_passes(version):
    m.check_version(version)


def spec(kind, **fields):
    return kind(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, **fields)


def groups(*specs):
    return KVCacheConfig(4, [], [KVCacheGroupSpec([f"l{i}"], s) for i, s in enumerate(specs)])


@pytest.mark.parametrize(
    "config",
    [
        groups(spec(SlidingWindowSpec, sliding_window=8)),
        groups(spec(FullAttentionSpec), spec(SlidingWindowSpec, sliding_window=8)),
        groups(spec(FullAttentionSpec), spec(FullAttentionSpec)),
        groups(spec(FullAttentionSpec, non_causal=True)),
        groups(),
    ],
)
def test_other_models_than_full_attention_in_one_group_are_refused(config):
    with pytest.raises(EngineError, match="full attention in one group"):
        m.check_groups(config, 16)


def test_full_attention_in_one_group_passes():
    m.check_groups(groups(spec(FullAttentionSpec)), 16)


LAYOUT = m.WorkerLayout(4096, "flat", 2, asynchronous=False)


def engine(folder, **changes):
    """Return what `make_manifest` reads of a vLLM configuration."""
    config = {"hidden": 8} | changes.pop("config", {})
    model = SimpleNamespace(
        model=str(folder), revision=None, seed=0, quantization=None, dtype="float32",
        hf_config=SimpleNamespace(to_dict=lambda: config),
        use_mla=False,
        get_total_num_kv_heads=lambda: 1, get_num_kv_heads=lambda parallel: 1,
    )  # fmt: skip
    vars(model).update(changes)
    return SimpleNamespace(
        model_config=model,
        load_config=SimpleNamespace(load_format="auto"),
        cache_config=SimpleNamespace(
            cache_dtype="auto", block_size=16, prefix_caching_hash_algo="sha256_cbor"
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


def test_other_weights_under_the_same_name_are_another_namespace(tmp_path):
    digests = set()
    weights = bytearray(3 << 20)
    for at in (None, 0, 1 << 20, len(weights) - 1):
        if at is not None:
            weights[at : at + (1 << 17)] = b"\x01" * len(weights[at : at + (1 << 17)])
        (tmp_path / "model.safetensors").write_bytes(weights)
        digests.add(m.make_manifest(engine(tmp_path), LAYOUT, "none").digest())
    assert len(digests) == 4


def test_a_copy_of_the_model_elsewhere_is_the_same_namespace(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "m").mkdir(parents=True)
        (tmp_path / name / "m" / "model.safetensors").write_bytes(b"weights" * 100)
    one, two = (m.make_manifest(engine(tmp_path / n / "m"), LAYOUT, "none") for n in ("one", "two"))
    assert one.digest() == two.digest()


@pytest.mark.parametrize(
    "change",
    [
        {"config": {"rope_scaling": 2}}, {"dtype": "bfloat16"}, {"quantization": "awq"},
    ],
)  # fmt: skip
def test_a_model_run_differently_is_another_namespace(tmp_path, change):
    plain = m.make_manifest(engine(tmp_path), LAYOUT, "none")
    assert m.make_manifest(engine(tmp_path, **change), LAYOUT, "none") != plain


def test_an_engine_that_verifies_is_in_another_namespace(tmp_path):
    plain = m.make_manifest(engine(tmp_path), LAYOUT, "none")
    sealed = m.make_manifest(
        engine(tmp_path), LAYOUT, read_options({"verify_loads": True}).checksum
    )
    assert plain.digest() != sealed.digest()
    assert sealed.shard_stride >= plain.shard_bytes + 16


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_a_slot_has_a_shard_for_each_part_of_the_heads(tmp_path, ranks, heads):
    """vLLM gives rank r the KV heads of part r // replicas."""
    config = engine(
        tmp_path,
        get_total_num_kv_heads=lambda: heads,
        get_num_kv_heads=lambda parallel: max(1, heads // parallel.tensor_parallel_size),
    )
    config.parallel_config.tensor_parallel_size = ranks
    assert m.kv_replicas(config) == max(1, ranks // heads)
    assert m.make_manifest(config, LAYOUT, "none").shards == min(ranks, heads)


def test_ranks_of_mla_hold_one_shard_whatever_the_model_calls_its_heads(tmp_path):
    config = engine(tmp_path, use_mla=True, get_total_num_kv_heads=lambda: 128)
    config.parallel_config.tensor_parallel_size = 8
    assert m.kv_replicas(config) == 8
    assert m.make_manifest(config, LAYOUT, "none").shards == 1


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"sockt": "/x"}, "did you mean socket"),
        ({"deadline": 5}, "did you mean deadline_ms"),
        ({"zzz": 1}, "the keys are socket, deadline_ms"),
        ({"socket": ""}, "must be a path"),
        ({"socket": 5}, "must be a path"),
        ({"deadline_ms": "250"}, "whole number"),
        ({"deadline_ms": 0}, "whole number"),
        ({"deadline_ms": True}, "whole number"),
        ({"deadline_ms": 1e3}, "whole number"),
        ({"verify_loads": "yes"}, "true or false"),
        ({"verify_loads": 1}, "true or false"),
        ({"otlp_endpoint": "collector:4318"}, "whole URL"),
        ({"otlp_endpoint": 4318}, "whole URL"),
    ],
)
def test_bad_extra_config_is_refused_by_key(extra, said):
    with pytest.raises(EngineError, match=said):
        read_options(extra)
