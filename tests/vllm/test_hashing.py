"""Block keys are vLLM's own, byte for byte: both algorithms, many prompts, with salts and seeds."""

import json
import random
import subprocess
import sys

import pytest
from kvtier.hashing import DEFAULT_SEED, block_keys
from servers import clean_environment

THEIRS = """
import json, sys
from types import SimpleNamespace
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils as utils

answers = []
for algorithm, tokens, block, salt in json.load(sys.stdin):
    hash_fn = get_hash_fn_by_name(algorithm)
    utils.init_none_hash(hash_fn)
    request = SimpleNamespace(
        block_hashes=[], num_tokens=len(tokens), all_token_ids=tokens, mm_features=[],
        lora_request=None, cache_salt=salt, prompt_embeds=None,
    )
    answers.append([h.hex() for h in utils.get_request_block_hasher(block, hash_fn)(request)])
print(json.dumps(answers))
"""


def prompts():
    """Prompts of many lengths, with numbers of every width, salts of every kind."""
    generator = random.Random(7)
    salts = [None, None, "", "acme", "cache_salt", "ü" * 40, "x" * 300]
    for algorithm in ("sha256", "sha256_cbor"):
        for _ in range(60):
            highest = generator.choice([10, 200, 300, 70_000, 200_000])
            length = generator.randrange(200)
            tokens = [generator.randrange(highest) for _ in range(length)]
            yield algorithm, tokens, generator.choice([1, 3, 16, 32]), generator.choice(salts)


@pytest.mark.parametrize("seed", [None, "0", "4294967295"])
def test_keys_are_those_that_vllm_computes(seed):
    asked = list(prompts())
    environment = clean_environment() | ({"PYTHONHASHSEED": seed} if seed else {})
    if seed is None:
        environment.pop("PYTHONHASHSEED", None)
    done = subprocess.run(
        [sys.executable, "-c", THEIRS],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout.splitlines()[-1])
    for (algorithm, tokens, block, salt), expected in zip(asked, theirs, strict=True):
        ours = block_keys(algorithm, seed or DEFAULT_SEED, tokens, block, salt)
        assert [key.hex() for key in ours] == expected
    assert any(theirs)
