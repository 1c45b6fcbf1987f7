"""Pages to shards and back, byte for byte, for the layouts that vLLM's backends use."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.distributed")

from kvtier.engine import paging as paging_module
from kvtier.engine.devices import page_caches
from kvtier.engine.paging import DONE, Copy, HostPaging, describe, process_cores
from kvtier.errors import EngineError
from late_paging import RUBBISH, LatePaging

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


def tokens_before_heads(dtype=torch.float32):
    """vLLM's LBNHC, what its CUDA backends take by default, with keys and values side by side."""
    whole = torch.empty(LAYERS, BLOCKS, TOKENS, HEADS, SIZE, dtype=dtype)
    return [whole[at].permute(0, 2, 1, 3) for at in range(LAYERS)]


def heads_before_blocks(dtype=torch.float32):
    """vLLM's LHBNC: a block's page is one piece a head."""
    whole = torch.empty(LAYERS, HEADS, BLOCKS, TOKENS, SIZE, dtype=dtype)
    return [whole[at].permute(1, 0, 2, 3) for at in range(LAYERS)]


def heads_before_layers(dtype=torch.float32):
    """vLLM's BHLNC."""
    whole = torch.empty(BLOCKS, HEADS, LAYERS, TOKENS, SIZE, dtype=dtype)
    return [whole[:, :, at] for at in range(LAYERS)]


def one_latent_head(dtype=torch.float32):
    """Latent attention: one head, whose stride says nothing."""
    whole = torch.empty(LAYERS, BLOCKS, TOKENS, SIZE, dtype=dtype)
    page = TOKENS * SIZE
    shape, stride = (BLOCKS, 1, TOKENS, SIZE), (page, 7, SIZE, 1)
    return [whole[at].as_strided(shape, stride) for at in range(LAYERS)]


def padded_pages(dtype=torch.float32):
    """Bytes between a page and the next that belong to nobody."""
    page = HEADS * TOKENS * SIZE
    whole = torch.empty(LAYERS, BLOCKS, page + 24, dtype=dtype)
    return [whole[at, :, :page].view(BLOCKS, HEADS, TOKENS, SIZE) for at in range(LAYERS)]


def unequal_steps(dtype=torch.float32):
    layers = one_storage(dtype)
    return [layers[0], layers[1], layers[4], layers[2], layers[3]]


def keys_apart_in_a_block(dtype=torch.float32):
    """As attention backends had it once: [blocks, 2, ...]."""
    return [torch.empty(BLOCKS, 2, TOKENS, HEADS, SIZE, dtype=dtype) for _ in range(LAYERS)]


LAYOUTS = [
    keys_apart_in_a_block,
    one_storage,
    separate,
    interleaved,
    tokens_first,
    kernel_blocks,
    tokens_before_heads,
    heads_before_blocks,
    heads_before_layers,
    one_latent_head,
    padded_pages,
    unequal_steps,
]


def odd_bytes(dtype=torch.uint8):
    return [torch.empty(BLOCKS, 1, 3, 5, dtype=dtype) for _ in range(LAYERS)]


def fill(caches):
    generator = torch.Generator().manual_seed(7)
    for cache in caches:
        cache.copy_(torch.randint(0, 100, cache.shape, generator=generator).to(cache.dtype))


@pytest.fixture
def make_paging(request):
    """HostPaging whose threads are ended with the test."""
    made = []

    def make(caches):
        made.append(HostPaging(caches, BLOCKS))
        return made[-1]

    yield make
    for paging in made:
        paging.close()


@pytest.mark.parametrize("make", [*LAYOUTS, odd_bytes])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_block_comes_back_as_it_was(make, dtype, make_paging):
    caches = make(dtype)
    fill(caches)
    before = [cache.clone() for cache in caches]
    paging = make_paging(caches)
    assert paging.shard_bytes == sum(c[0].numel() * c.element_size() for c in caches) * (
        caches[0].shape[0] // BLOCKS
    )
    shards = [torch.zeros(paging.shard_bytes, dtype=torch.uint8) for _ in range(BLOCKS)]
    copies = list(map(Copy, range(BLOCKS), shards))
    assert paging.store(copies).done()
    for cache in caches:
        cache.zero_()
    assert paging.load(copies).done()
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def test_a_load_changes_its_block_only_and_shows_corruption(make_paging):
    caches = one_storage()
    fill(caches)
    before = [cache.clone() for cache in caches]
    paging = make_paging(caches)
    shard = torch.zeros(paging.shard_bytes, dtype=torch.uint8)
    paging.store([Copy(2, shard)])
    shard[paging.shard_bytes // 2] ^= 1
    paging.load([Copy(2, shard)])
    different = [
        (layer, block)
        for layer in range(LAYERS)
        for block in range(BLOCKS)
        if not torch.equal(caches[layer][block], before[layer][block])
    ]
    assert different == [(2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_block_moves_between_caches_of_another_size(dtype, make_paging):
    sources, targets = one_storage(dtype), [c[: BLOCKS - 2] for c in heads_before_blocks(dtype)]
    fill(sources)
    for cache in targets:
        cache.zero_()
    paging = make_paging(sources)
    other = HostPaging(targets, BLOCKS - 2)
    shard = torch.empty(paging.shard_bytes, dtype=torch.uint8)
    paging.store([Copy(BLOCKS - 1, shard)])
    other.load([Copy(0, shard)])
    other.close()
    assert describe(sources) == describe(targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(source[BLOCKS - 1], target[0])


def test_two_threads_copy_each_block_once_and_a_failure_of_either_is_raised(monkeypatch):
    monkeypatch.setattr(paging_module, "SHARED_BYTES", 0)
    monkeypatch.setattr(paging_module.os, "sched_setaffinity", lambda task, cores: None)
    caches = one_storage()
    fill(caches)
    before = [cache.clone() for cache in caches]
    paging = HostPaging(caches, BLOCKS, cores=frozenset({0, 1}))
    assert paging.threads == 2
    shards = [torch.zeros(paging.shard_bytes, dtype=torch.uint8) for _ in range(BLOCKS)]
    for _ in range(50):
        for shard in shards:
            shard.zero_()
        paging.store(list(map(Copy, range(BLOCKS), shards)))
        paging.load(list(map(Copy, reversed(range(BLOCKS)), reversed(shards))))
        assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))
    with pytest.raises(ValueError, match=r"reshape|array"):
        paging.load([Copy(0, shards[0][:-8])] * 40)
    paging.close()


def test_one_core_copies_in_one_thread():
    assert HostPaging(one_storage(), BLOCKS, cores=frozenset({3})).threads == 1


def test_a_bound_thread_does_not_hide_the_cores_of_the_process(monkeypatch):
    bound = {threading.get_native_id(): {0}}
    monkeypatch.setattr(paging_module.os, "sched_getaffinity", lambda task: bound.get(task, {1}))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        assert process_cores() == {0, 1}


def test_equal_layers_are_copied_together(make_paging):
    runs = {
        make.__name__: len(make_paging(make()).runs)
        for make in (one_storage, interleaved, tokens_before_heads, heads_before_blocks)
    }
    assert set(runs.values()) == {1}, runs
    assert len(make_paging(separate()).runs) == LAYERS
    assert len(make_paging(heads_before_layers()).runs) == LAYERS


@pytest.mark.parametrize("make", LAYOUTS)
def test_layers_are_counted_whatever_their_pieces(make, make_paging):
    assert make_paging(make()).layers == LAYERS


def test_layers_that_share_memory_are_stored_once(make_paging):
    caches = one_storage()
    paging = make_paging([*caches, caches[0]])
    assert paging.layers == LAYERS


def test_a_page_with_gaps_is_refused():
    padded = [torch.empty(BLOCKS, HEADS, TOKENS, SIZE + 8)[..., :SIZE] for _ in range(LAYERS)]
    with pytest.raises(EngineError, match=r"gaps.*VLLM_KV_CACHE_LAYOUT"):
        HostPaging(padded, BLOCKS)


def test_keys_apart_from_values_in_front_of_the_blocks_are_refused():
    """As attention backends had it once: [2, blocks, ...]."""
    apart = [torch.empty(2, BLOCKS, TOKENS, HEADS, SIZE) for _ in range(LAYERS)]
    with pytest.raises(EngineError, match="does not start with 6 blocks"):
        HostPaging(apart, BLOCKS)


def test_the_layout_tells_orders_of_bytes_apart():
    texts = {describe(make()) for make in (one_storage, tokens_first, odd_bytes)}
    texts.add(describe(one_storage(torch.bfloat16)))
    assert len(texts) == 4
    assert describe(one_storage()) == describe(separate())


def test_the_layout_is_the_same_for_caches_of_another_length():
    few = [torch.empty(HEADS, 3, TOKENS, SIZE).transpose(0, 1) for _ in range(LAYERS)]
    assert describe(heads_before_blocks()) == describe(few)
    assert describe(one_latent_head()) == describe(
        [torch.empty(1, 3, TOKENS, SIZE).transpose(0, 1) for _ in range(LAYERS)]
    )


def test_caches_on_an_unknown_device_are_refused_with_the_fix():
    with pytest.raises(EngineError, match="on meta: run vLLM on CPU or CUDA"):
        page_caches([cache.to("meta") for cache in separate()], BLOCKS)


def test_nothing_to_copy_is_done(make_paging):
    paging = make_paging(one_storage())
    paging.attach(torch.empty(8, dtype=torch.uint8))
    paging.begin_step()
    paging.fence([paging.load([]), paging.store([]), DONE])
    assert paging.load([]) is DONE


@pytest.fixture
def late(make_paging):
    """A late paging, its caches, and two shards in an attached slab."""
    caches = one_storage(torch.uint8)
    fill(caches)
    paging = LatePaging(make_paging(caches), polls=3)
    slab = torch.zeros(2, paging.shard_bytes, dtype=torch.uint8)
    paging.attach(slab.view(-1))
    return paging, caches, list(slab)


def test_a_late_store_is_rubbish_until_it_was_polled_often_enough(late):
    paging, caches, (shard, _) = late
    transfer = paging.store([Copy(1, shard)])
    assert bool((shard == RUBBISH).all())
    caches[0][1].fill_(200)  # Too early: nobody fenced.
    assert [transfer.done() for _ in range(4)] == [False, False, True, True]
    assert bool((shard[: caches[0][1].numel()] == 200).all())


def test_a_late_load_leaves_rubbish_in_its_block_until_a_fence(late):
    paging, caches, (shard, _) = late
    shard.fill_(7)
    transfer = paging.load([Copy(4, shard)])
    paging.begin_step()
    assert all(bool((cache[4] == RUBBISH).all()) for cache in caches)
    paging.fence([DONE, transfer])
    assert all(bool((cache[4] == 7).all()) for cache in caches)
    assert transfer.done()


def test_late_transfers_are_carried_out_at_the_end(late):
    paging, caches, (one, other) = late
    transfers = [paging.store([Copy(0, one)]), paging.store([Copy(1, other)])]
    paging.close()
    assert all(transfer.done() for transfer in transfers)
    assert torch.equal(other[: caches[0][1].numel()], caches[0][1].flatten())


def test_a_late_transfer_outside_of_an_attached_slab_is_a_mistake(late):
    paging, _, _ = late
    with pytest.raises(AssertionError, match="attached slab"):
        paging.load([Copy(0, torch.zeros(paging.shard_bytes, dtype=torch.uint8))])
