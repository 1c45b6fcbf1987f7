"""Pages to shards and back, byte for byte, for the layouts that vLLM's backends use."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvtier.engine.paging import HostPaging, describe
from kvtier.errors import EngineError

pytestmark = pytest.mark.vllm
BLOCKS, LAYERS, HEADS, TOKENS, SIZE = 6, 5, 2, 4, 16


def one_storage(dtype=torch.float32, gap=0):
    """All layers one after the other in one storage, as on CPU."""
    page = HEADS * TOKENS * SIZE
    whole = torch.empty(LAYERS * (BLOCKS * page + gap), dtype=dtype)
    return [
        whole[at * (BLOCKS * page + gap) :][: BLOCKS * page].view(BLOCKS, HEADS, TOKENS, SIZE)
        for at in range(LAYERS)
    ]


def separate(dtype=torch.float32):
    return [torch.empty(BLOCKS, HEADS, TOKENS, SIZE, dtype=dtype) for _ in range(LAYERS)]


def interleaved(dtype=torch.float32):
    """A block's layers side by side: a page's stride is not its size."""
    whole = torch.empty(BLOCKS, LAYERS, HEADS, TOKENS, SIZE, dtype=dtype)
    return [whole[:, at] for at in range(LAYERS)]


def tokens_first(dtype=torch.float32):
    """Heads and tokens swapped in memory: the page is dense, in another order."""
    return [cache.transpose(1, 2) for cache in one_storage(dtype)]


def kernel_blocks(dtype=torch.float32):
    """Each of vLLM's blocks is two of the kernel's."""
    return [torch.empty(BLOCKS * 2, HEADS, TOKENS, SIZE, dtype=dtype) for _ in range(LAYERS)]


def unequal_steps(dtype=torch.float32):
    layers = one_storage(dtype)
    return [layers[0], layers[1], layers[4], layers[2], layers[3]]


def odd_bytes(dtype=torch.uint8):
    return [torch.empty(BLOCKS, 1, 3, 5, dtype=dtype) for _ in range(LAYERS)]


def fill(caches):
    generator = torch.Generator().manual_seed(7)
    for cache in caches:
        cache.copy_(torch.randint(0, 100, cache.shape, generator=generator).to(cache.dtype))


@pytest.mark.parametrize(
    "make",
    [one_storage, separate, interleaved, tokens_first, kernel_blocks, unequal_steps, odd_bytes],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_block_comes_back_as_it_was(make, dtype):
    caches = make(dtype)
    fill(caches)
    before = [cache.clone() for cache in caches]
    paging = HostPaging(caches, BLOCKS)
    assert paging.shard_bytes == sum(c[0].numel() * c.element_size() for c in caches) * (
        caches[0].shape[0] // BLOCKS
    )
    shards = [torch.zeros(paging.shard_bytes, dtype=torch.uint8) for _ in range(BLOCKS)]
    for block, shard in enumerate(shards):
        paging.store(block, shard)
    for cache in caches:
        cache.zero_()
    for block, shard in enumerate(shards):
        paging.load(block, shard)
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def test_a_load_changes_its_block_only_and_shows_corruption():
    caches = one_storage()
    fill(caches)
    before = [cache.clone() for cache in caches]
    paging = HostPaging(caches, BLOCKS)
    shard = torch.zeros(paging.shard_bytes, dtype=torch.uint8)
    paging.store(2, shard)
    shard[paging.shard_bytes // 2] ^= 1
    paging.load(2, shard)
    different = [
        (layer, block)
        for layer in range(LAYERS)
        for block in range(BLOCKS)
        if not torch.equal(caches[layer][block], before[layer][block])
    ]
    assert different == [(2, 2)]


def test_equal_layers_are_copied_together():
    assert len(HostPaging(one_storage(), BLOCKS).runs) == 1
    assert len(HostPaging(interleaved(), BLOCKS).runs) == 1
    assert len(HostPaging(separate(), BLOCKS).runs) == LAYERS


def test_layers_that_share_memory_are_stored_once():
    caches = one_storage()
    paging = HostPaging([*caches, caches[0]], BLOCKS)
    assert paging.layers == LAYERS


def test_a_page_with_gaps_is_refused():
    padded = [torch.empty(BLOCKS, HEADS, TOKENS, SIZE + 8)[..., :SIZE] for _ in range(LAYERS)]
    with pytest.raises(EngineError, match="gaps"):
        HostPaging(padded, BLOCKS)


def test_the_layout_tells_orders_of_bytes_apart():
    texts = {describe(make()) for make in (one_storage, tokens_first, odd_bytes)}
    texts.add(describe(one_storage(torch.bfloat16)))
    assert len(texts) == 4
    assert describe(one_storage()) == describe(separate())
