"""Block keys against digests that vLLM 0.32 made; a test with vLLM itself is in `tests/vllm`."""

import pytest
from kvtier.hashing import DEFAULT_SEED, block_keys, find_seed, seed_digest

TOKENS = [0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1]


def test_only_whole_blocks_have_keys():
    for length, blocks in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2)):
        keys = list(block_keys("sha256_cbor", DEFAULT_SEED, TOKENS[:length], 4))
        assert [len(key) for key in keys] == [32] * blocks


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_everything_before_a_block_is_in_its_key(algorithm):
    keys = list(block_keys(algorithm, DEFAULT_SEED, TOKENS, 4))
    assert keys[1:] != list(block_keys(algorithm, DEFAULT_SEED, [1, *TOKENS[1:]], 4))[1:]
    assert keys[1:] != list(block_keys(algorithm, DEFAULT_SEED, TOKENS, 4, salt="acme"))[1:]
    assert keys[1:] != list(block_keys(algorithm, "0", TOKENS, 4))[1:]
    assert keys == list(block_keys(algorithm, DEFAULT_SEED, TOKENS, 4, salt=""))


def test_a_seed_is_found_if_it_is_known_or_told():
    assert find_seed(seed_digest(DEFAULT_SEED), None) == DEFAULT_SEED
    assert find_seed(seed_digest("0"), None) == "0"
    assert find_seed(seed_digest("4711"), None) is None
    assert find_seed(seed_digest("4711"), "4711") == "4711"
    assert find_seed(seed_digest("4711"), "4712") is None
