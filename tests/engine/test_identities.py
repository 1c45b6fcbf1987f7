"""vLLM's own requests with equal tokens that mean different KV: none may get another's blocks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.distributed")

from simulated import TOKENS
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

pytestmark = pytest.mark.vllm

BLOCKS = 4
LENGTH = BLOCKS * TOKENS + 1
WIDTH = 8
WHOLE = BLOCKS * TOKENS


@pytest.fixture(scope="module")
def hasher():
    function = get_hash_fn_by_name("sha256_cbor")
    init_none_hash(function)
    return get_request_block_hasher(TOKENS, function)


def image(identifier, offset=0, length=LENGTH - 1):
    place = PlaceholderRange(offset=offset, length=length)
    return {"mm_features": [MultiModalFeatureSpec(None, "image", identifier, place)]}


def embeds(seed):
    drawn = torch.randn(LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return {"prompt_token_ids": None, "prompt_embeds": drawn}


def adapter(name, path="/adapters/one"):
    return {"lora_request": LoRARequest(name, 1, path)}


def serve(engine, hasher, name, first_block, fields):
    """Serve a request as vLLM would, and return how many tokens were matched."""
    whole = {"prompt_token_ids": [5] * LENGTH} | fields
    request = Request(
        request_id=name,
        sampling_params=SamplingParams(max_tokens=4),
        pooling_params=None,
        block_hasher=hasher,
        **whole,
    )
    assert len(request.block_hashes) == BLOCKS
    request.blocks = list(range(first_block, first_block + BLOCKS + 1))
    matched = engine.admit(request)
    engine.step({request: LENGTH - matched})
    engine.step({})
    return matched


DIFFERENT = {
    "no image": ({}, image("a" * 64)),
    "images": (image("a" * 64), image("b" * 64)),
    "images whose hashes end alike": (image("a" * 60 + "beef"), image("b" * 60 + "beef")),
    "one image at two places": (image("a" * 64, 0, 8), image("a" * 64, 1, 8)),
    "tokens and embeddings": ({}, embeds(1)),
    "embeddings": (embeds(1), embeds(2)),
    "salts": ({"cache_salt": "x"}, {"cache_salt": "y"}),
    "no salt": ({"cache_salt": "x"}, {}),
    "no adapter": ({}, adapter("A")),
    "adapters": (adapter("A"), adapter("B")),
    "an adapter's other folder": (adapter("A"), adapter("A", "/adapters/two")),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_differs_never_matches(case, engines, hasher):
    one, other = DIFFERENT[case]
    first, second = engines("one"), engines("two")
    assert serve(first, hasher, "r", 0, one) == 0
    assert serve(second, hasher, "s", 0, other) == 0
    repeated = 0 if "lora_request" in other else WHOLE
    assert serve(second, hasher, "t", 20, other) == repeated


SAME = {
    "tokens": {},
    "an image": image("a" * 64),
    "embeddings": embeds(1),
    "a salt": {"cache_salt": "x"},
}


@pytest.mark.parametrize("case", SAME)
def test_what_is_equal_matches_in_another_engine(case, engines, hasher):
    assert serve(engines("one"), hasher, "r", 0, SAME[case]) == 0
    assert serve(engines("two"), hasher, "s", 20, SAME[case]) == WHOLE


def test_an_adapter_whose_folder_got_other_weights_never_matches(engines, hasher):
    """vLLM's hash has name and path only, so a request with an adapter goes past the cache."""
    engine = engines()
    assert serve(engine, hasher, "r", 0, adapter("A")) == 0
    assert serve(engine, hasher, "s", 20, adapter("A")) == 0
