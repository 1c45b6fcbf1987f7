"""Transfers beside a model: orders on a device that carries out its queues in any order it may.

The device is a fake (`tests/fake_gpu.py`): what it shows is which event is waited for, not speed.
`loadtest/gpu_check.py` runs the same stress on a real one.
"""

from __future__ import annotations

import gc
import logging
import mmap
import sys
import weakref
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm.distributed")

sys.path.append(str(Path(__file__).parents[2]))  # for loadtest

from fake_gpu import FakeEvent, FakeGpu, FakeModel
from kvtier.engine.cuda import CudaPaging
from kvtier.engine.paging import DONE, Copy, HostPaging
from late_paging import LatePaging

from loadtest.paging_stress import Stress

pytestmark = pytest.mark.vllm
LOG = logging.getLogger("kvtier.test")
BLOCKS, LAYERS, HEADS, TOKENS, SIZE = 12, 3, 2, 2, 4
SLOTS = 10
SEEDS = range(12)
STEPS = 40


def layer_first(blocks=BLOCKS):
    whole = torch.zeros(LAYERS, blocks, HEADS, TOKENS, SIZE, dtype=torch.int32)
    return list(whole)


def block_first(blocks=BLOCKS):
    whole = torch.zeros(blocks, LAYERS, HEADS, TOKENS, SIZE, dtype=torch.int32)
    return [whole[:, layer] for layer in range(LAYERS)]


def heads_before_blocks(blocks=BLOCKS):
    whole = torch.zeros(LAYERS, HEADS, blocks, TOKENS, SIZE, dtype=torch.int32)
    return [layer.transpose(0, 1) for layer in whole]


class Bench:
    """A paging over a fake device, with a slab of `SLOTS` slots attached."""

    def __init__(self, seed=0, make=layer_first, cls=CudaPaging, **gpu):
        self.gpu = FakeGpu(seed, **gpu)
        self.caches = make()
        self.model = FakeModel(self.gpu, self.caches)
        self.paging = cls(self.caches, BLOCKS, self.gpu, LOG)
        size = self.paging.shard_bytes
        self.slab = torch.zeros(SLOTS * size, dtype=torch.uint8)
        self.shards = list(self.slab.view(SLOTS, size))
        self.paging.attach(self.slab)

    def stress(self, steps=STEPS):
        stress = Stress(self.paging, self.model, self.shards, self.gpu.random.randrange(1 << 30))
        stress.run(steps)
        return stress

    def fill(self, block, number):
        """Have the model write a block whose layers hold number, number + 1 and so on."""
        self.model.write(block, [number + layer for layer in range(LAYERS)])

    def holds(self, slot):
        return self.shards[slot].view(torch.int32).view(LAYERS, -1)[:, 0].tolist()


@pytest.mark.parametrize("pins", [True, False])
@pytest.mark.parametrize("make", [layer_first, block_first, heads_before_blocks])
def test_whatever_the_device_does_first_the_bytes_are_right(make, pins):
    counts = Counter()
    for seed in SEEDS:
        bench = Bench(seed, make, pins=pins)
        stress = bench.stress()
        assert stress.wrong == [], f"seed {seed}"
        bench.paging.close()
        assert bench.gpu.registered == {}
        counts += stress.counts
    assert min(counts[kind] for kind in ("loads", "stores", "checks")) > 20 * len(SEEDS)


WAITS = {
    "a store, for the model's last writes": ("stores", "compute"),
    "a load, for the model's earlier uses of the block": ("loads", "compute"),
    "the model, for a store that reads what it overwrites": ("compute", "stores"),
    "the model, for a load that it reads": ("compute", "loads"),
    "a load, for a store that reads what it overwrites": ("loads", "stores"),
}


@pytest.mark.parametrize("pair", WAITS.values(), ids=WAITS)
def test_without_this_wait_bytes_are_wrong(pair):
    deaf = frozenset({pair})
    assert any(Bench(seed, deaf=deaf).stress().wrong for seed in range(100))


def test_no_other_waits_are_made():
    bench = Bench()
    bench.stress()
    # A load waits for an event of its own stream when a fence names a load: that costs nothing.
    assert bench.gpu.waits == {*WAITS.values(), ("loads", "loads")}


class WithoutFences(CudaPaging):
    def fence(self, transfers):
        pass


def test_a_connector_without_fences_would_show():
    assert any(Bench(seed, cls=WithoutFences).stress().wrong for seed in SEEDS)


@pytest.mark.parametrize("polls", [1, 2, 5])
def test_the_stress_passes_late_host_paging(polls):
    stress = host_stress(lambda inner: LatePaging(inner, polls))
    assert stress.wrong == []


class LateWithoutFences(LatePaging):
    def fence(self, transfers):
        pass


def test_late_host_paging_without_fences_gives_wrong_bytes():
    assert host_stress(lambda inner: LateWithoutFences(inner, 3)).wrong


def test_the_stress_passes_host_paging_without_fences():
    """Nothing is on its way there, so that fences have nothing to do: it cannot show their lack."""
    assert host_stress(lambda inner: inner).wrong == []


def host_stress(wrap):
    gpu = FakeGpu(0)
    model = FakeModel(gpu, layer_first())
    model.write, model.read = at_once(gpu, model.write), at_once(gpu, model.read)
    paging = wrap(HostPaging(model.caches, BLOCKS))
    slab = torch.zeros(SLOTS * paging.shard_bytes, dtype=torch.uint8)
    paging.attach(slab)
    stress = Stress(paging, model, list(slab.view(SLOTS, -1)), seed=5)
    stress.run(STEPS)
    paging.close()
    return stress


def at_once(gpu, call):
    def wrapped(*arguments):
        result = call(*arguments)
        gpu.settle()
        return result

    return wrapped


def test_a_store_is_put_off_to_the_next_step_with_the_bytes_of_its_own():
    bench = Bench()
    bench.fill(3, 100)
    transfer = bench.paging.store([Copy(3, bench.shards[0])])
    bench.gpu.settle()
    assert not transfer.done()
    assert bench.gpu.batches == []
    bench.paging.begin_step()
    bench.gpu.settle()
    assert transfer.done()
    assert bench.holds(0) == [100, 101, 102]


def test_a_fence_starts_a_store_that_was_put_off_and_the_host_waits_for_nothing():
    bench = Bench()
    bench.fill(3, 100)
    transfer = bench.paging.store([Copy(3, bench.shards[0])])
    bench.paging.fence([transfer, DONE])
    assert len(bench.gpu.batches) == 1
    assert not transfer.end.passed
    bench.fill(3, 200)
    bench.gpu.settle()
    assert bench.holds(0) == [100, 101, 102]
    bench.paging.begin_step()
    assert len(bench.gpu.batches) == 1


def test_a_load_does_not_wait_for_the_step_that_it_is_called_in():
    bench = Bench()
    bench.paging.begin_step()
    bench.gpu.settle()
    never = FakeEvent(bench.gpu.compute)
    bench.gpu.compute.wait_event(never)  # A forward pass without an end.
    after = bench.gpu.compute.record_event()
    transfer = bench.paging.load([Copy(0, bench.shards[0])])
    while bench.gpu.work():
        pass
    assert transfer.done()
    assert not after.passed


def test_a_load_before_the_first_step_waits_for_all_that_was_given_before():
    bench = Bench()
    bench.fill(0, 100)
    bench.shards[0].zero_()
    transfer = bench.paging.load([Copy(0, bench.shards[0])])
    transfer.end.synchronize()
    bench.gpu.settle()
    assert all(not cache[0].any() for cache in bench.caches)


def test_the_stream_is_asked_for_at_each_call():
    """vLLM captures graphs, and may compute, in streams of its own."""
    bench = Bench()
    other = bench.gpu._stream("other")
    bench.gpu.compute, old = other, bench.gpu.compute
    bench.fill(1, 7)
    transfer = bench.paging.store([Copy(1, bench.shards[0])])
    assert transfer.after.stream is other
    bench.paging.begin_step()
    bench.gpu.settle()
    assert bench.holds(0) == [7, 8, 9]
    assert not old.todo


def test_nothing_to_copy_is_done_and_costs_the_device_nothing():
    bench = Bench()
    assert bench.paging.load([]) is DONE
    assert bench.paging.store([]) is DONE
    bench.paging.begin_step()
    assert bench.gpu.batches == []


def test_pages_side_by_side_are_one_copy_a_block():
    pieces = {
        make.__name__: Bench(make=make).paging.pieces.count
        for make in (layer_first, block_first, heads_before_blocks)
    }
    assert pieces == {
        "layer_first": LAYERS,
        "block_first": 1,
        "heads_before_blocks": LAYERS * HEADS,
    }


def test_a_batch_covers_each_byte_of_its_blocks_and_shards_once():
    bench = Bench(make=heads_before_blocks)
    batch = bench.paging.pieces.batch([Copy(5, bench.shards[2]), Copy(1, bench.shards[7])])
    assert all(column.dtype == torch.int64 and column.is_contiguous() for column in batch)
    assert int(batch.sizes.sum()) == 2 * bench.paging.shard_bytes
    bytes_of = [
        {
            byte
            for start, size in zip(side, batch.sizes, strict=True)
            for byte in range(start, start + size)
        }
        for side in (batch.pages, batch.shards)
    ]
    assert [len(each) for each in bytes_of] == [2 * bench.paging.shard_bytes] * 2
    start = bench.caches[0].data_ptr()
    whole = bench.caches[0].untyped_storage().nbytes()
    assert min(bytes_of[0]) >= start
    assert max(bytes_of[0]) < start + whole


def test_a_transfer_keeps_its_memory_mapped_until_it_is_done():
    bench = Bench()
    memory = mmap.mmap(-1, bench.paging.shard_bytes)
    mapped = weakref.ref(memory)
    shard = torch.frombuffer(memory, dtype=torch.uint8)
    bench.paging.attach(shard)
    held = FakeEvent(bench.gpu.compute)
    bench.gpu.compute.wait_event(held)
    bench.paging.store([Copy(0, shard)])
    bench.paging.begin_step()
    del memory, shard
    gc.collect()
    assert mapped() is not None
    held.passed = True
    bench.gpu.settle()
    bench.paging.begin_step()
    gc.collect()
    assert mapped() is None


def test_a_slab_is_let_go_after_the_transfers_that_use_it():
    bench = Bench()
    bench.fill(2, 30)
    store = bench.paging.store([Copy(2, bench.shards[4])])
    load = bench.paging.load([Copy(3, bench.shards[5])])
    bench.paging.detach(bench.slab)
    assert store.done()
    assert load.done()
    assert bench.holds(4) == [30, 31, 32]
    assert bench.gpu.registered == {}


def test_close_waits_for_what_has_begun_and_drops_what_was_put_off():
    bench = Bench()
    bench.fill(2, 30)
    begun = bench.paging.store([Copy(2, bench.shards[4])])
    bench.paging.begin_step()
    put_off = bench.paging.store([Copy(2, bench.shards[5])])
    bench.paging.close()
    assert begun.done()
    assert not put_off.done()
    assert bench.holds(4) == [30, 31, 32]
    assert bench.holds(5) == [0, 0, 0]
    assert bench.gpu.registered == {}
    bench.paging.detach(bench.slab)


def test_a_driver_that_pins_nothing_is_told_of_once_with_the_fix(caplog):
    bench = Bench(pins=False)
    bench.paging.attach(torch.zeros(64, dtype=torch.uint8))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "ulimit -l unlimited" in lines[0]
    bench.paging.close()


def test_what_is_done_is_not_kept():
    bench = Bench()
    for _ in range(5):
        bench.paging.begin_step()
        bench.paging.store([Copy(0, bench.shards[0])])
        bench.paging.load([Copy(1, bench.shards[1])])
        bench.gpu.settle()
    bench.paging.begin_step()
    bench.gpu.settle()
    bench.paging.begin_step()
    assert bench.paging._started == []
    assert bench.paging._put_off == []
