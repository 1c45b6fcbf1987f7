"""The figure of page copies: what it measures is what an engine does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.append(str(Path(__file__).parents[2]))  # for loadtest

from kvtier.engine.paging import HostPaging

from loadtest import page_copy

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(page_copy, "POOL_BYTES", 16 << 20)
    monkeypatch.setattr(page_copy, "BATCH_BYTES", 6 << 20)
    monkeypatch.setattr(page_copy, "ROUNDS", 2)


def test_every_size_of_block_layers_and_direction_has_a_ratio():
    cells = list(page_copy.cells(frozenset({0})))
    places = {(cell.block_bytes, cell.layers, cell.direction) for cell in cells}
    assert len(places) == len(cells) == 12
    assert all(cell.ratio > 0 for cell in cells)
    assert {cell.threads for cell in cells} == {1}
    for cell, wanted in zip(cells[::4], page_copy.BLOCK_BYTES, strict=True):
        assert wanted * 0.9 < cell.block_bytes <= wanted


def test_caches_lie_as_vllm_makes_them_on_cpus():
    caches = page_copy.make_caches(400_000, 30, 5)
    assert len({cache.untyped_storage().data_ptr() for cache in caches}) == 1
    assert all(cache.is_contiguous() for cache in caches)
    paging = HostPaging(caches, 5, frozenset({0}))
    assert paging.layers == 30
    assert len(paging.runs) == 1
