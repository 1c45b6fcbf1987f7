"""vLLM with kvtier's connector on this machine's device: cold, from L0, from L1; equal tokens.

Starts a server, then `vllm.LLM` in this process on a tiny model, and asks each prompt by itself,
greedily. Then many prompts at once, more than the device's cache holds, twice. Prints one JSON line
last. A cold answer is computed in other pieces than a cached one, so that on a GPU they may differ
in the last bit, and then in a token: answers from L1 must be those from L0, token for token, and
how many are the cold ones is told.

    python -m loadtest.gpu_engine
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import tiny
from .stack import start_server

if TYPE_CHECKING:
    from vllm import LLM

PROMPTS = 8
PROMPT_TOKENS = 1200
ANSWER_TOKENS = 24
MODEL_TOKENS = 2048
BLOCK_TOKENS = 32
CACHE_BYTES = 24 << 20
"""Of the device: about six prompts in bf16, so that many at once evict, and preempt, each other."""
CAPACITY = "512MiB"
CACHED_SHARE = 0.9


def main() -> int:
    """Run it. Returns 1 if tokens differ or too little came from L1."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "DO_NOT_TRACK": "1"}
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder), "--capacity", CAPACITY)
        try:
            server.wait()
            model = tiny.tiny_model(Path(folder) / "model")
            line = _run(_engine(model, Path(folder) / "server.sock"))
        finally:
            server.stop()
    print(json.dumps(line))
    return 0 if line["ok"] else 1


def _engine(model: Path, socket: Path) -> LLM:
    import torch
    from vllm import LLM

    options: dict[str, Any] = {"dtype": "bfloat16"}
    if not torch.cuda.is_available():
        options = {"dtype": "float32", "enforce_eager": True}
    return LLM(
        model=str(model),
        max_model_len=MODEL_TOKENS,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=CACHE_BYTES,
        prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config={
            "kv_connector": "KVTierConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": str(socket)},
        },
        **options,
    )


def _run(llm: LLM) -> dict[str, Any]:
    """Return what was measured and whether it is as it must be."""
    prompts = [_prompt(number) for number in range(PROMPTS)]
    cold, device, host = [], [], []
    for prompt in prompts:
        cold.append(_ask(llm, [prompt])[0])
        device.append(_ask(llm, [prompt])[0])
        _drain(llm)
        llm.reset_prefix_cache()
        host.append(_ask(llm, [prompt])[0])
        llm.reset_prefix_cache()
    many = [_prompt(number) for number in range(100, 100 + 3 * PROMPTS)]
    first, second = _ask(llm, many), _ask(llm, many)
    cached = [answer["cached"] / PROMPT_TOKENS for answer in host]
    equal = [one["tokens"] == other["tokens"] for one, other in zip(device, host, strict=True)]
    return {
        "ok": all(equal) and min(cached) >= CACHED_SHARE,
        "equal_to_device": sum(equal) / PROMPTS,
        "equal_to_cold": _share(cold, host),
        "equal_at_once": _share(first, second),
        "cached_share": min(cached),
        "cached_at_once": sum(answer["cached"] for answer in second) / PROMPT_TOKENS / len(many),
        "cold_seconds": _median(cold),
        "device_seconds": _median(device),
        "host_seconds": _median(host),
    }


def _ask(llm: LLM, prompts: list[list[int]]) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    began = time.perf_counter()
    got = llm.generate([{"prompt_token_ids": each} for each in prompts], greedy, use_tqdm=False)
    seconds = time.perf_counter() - began
    return [
        {
            "tokens": list(each.outputs[0].token_ids),
            "cached": each.num_cached_tokens or 0,
            "seconds": seconds,
        }
        for each in got
    ]


def _drain(llm: LLM) -> None:
    """Give stores that are under way steps to end in."""
    _ask(llm, [[tiny_token(0)] * 4])
    time.sleep(0.2)
    _ask(llm, [[tiny_token(1)] * 4])


def tiny_token(number: int) -> int:
    """Return the id of the tiny model's token for a byte."""
    return len(tiny.SPECIAL_TOKENS) + number


def _prompt(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [tiny_token(draw.randrange(256)) for _ in range(PROMPT_TOKENS)]


def _share(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    pairs = list(zip(one, other, strict=True))
    return sum(first["tokens"] == second["tokens"] for first, second in pairs) / len(pairs)


def _median(answers: list[dict[str, Any]]) -> float:
    return float(sorted(answer["seconds"] for answer in answers)[len(answers) // 2])


if __name__ == "__main__":
    sys.exit(main())
