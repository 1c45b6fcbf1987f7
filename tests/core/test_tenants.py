"""Totals by tenant: as many names as engines like, and a bounded number of totals."""

from __future__ import annotations

import pytest
from kvtier.accounts import OTHER, TENANTS_AT_MOST, Accounts
from kvtier.core import Role, Tier
from kvtier.metrics import Metrics
from kvtier.protocol import Asked
from kvtier.readings import Readings
from kvtier.tenant_metrics import TENANT_LABELS_AT_MOST
from kvtier.tenants import Tenants
from support import MANIFEST, chain, hierarchy, tokens

TOKENS = MANIFEST.block_tokens


@pytest.fixture
def cache():
    made = hierarchy(16)
    yield made
    made.host.close()


def test_tenants_beyond_the_limit_share_one_total():
    tenants = Tenants(Accounts())
    for number in range(TENANTS_AT_MOST + 50):
        tenants.tally(f"tenant {number}").lookups += 1
        tenants.tally("").lookups += 1
    readings = {reading.tenant: reading.lookups for reading in tenants.readings()}
    assert len(readings) == TENANTS_AT_MOST + 2
    assert readings["tenant 0"] == readings[f"tenant {TENANTS_AT_MOST - 1}"] == 1
    assert readings[OTHER] == 50
    assert readings[""] == TENANTS_AT_MOST + 50


def test_all_tenants_together_make_up_the_servers_totals(cache):
    session = cache.open_session(Role.SCHEDULER, "e", 0, 1, MANIFEST)
    keys = chain("document", 3)
    for number, tenant in enumerate(("", "a", "b", "a")):
        cache.count(session, Asked(tenant, 10, 4, number, number in {1, 3}))
        cache.lookup(session, number, keys, 0, tenant)
    cache.commit(session, b"", keys, cache.reserve(session, 3, 0), "b")
    readings = {reading.tenant: reading for reading in Readings(cache).tenants()}
    assert list(readings) == ["", "a", "b"]
    of_a = tokens(readings["a"].traffic)
    assert of_a["device"] == (20 * TOKENS, 8 * TOKENS)
    assert of_a["host"] == (12 * TOKENS, 4 * TOKENS)
    assert of_a["disk"] == (8 * TOKENS, 2 * TOKENS)
    assert of_a["redis"] == (6 * TOKENS, 0)
    assert readings["a"].lookups == 2
    assert [reading.stored_blocks for reading in readings.values()] == [0, 0, 3]
    assert sum(reading.lookups for reading in readings.values()) == 4
    whole = {"device": (40 * TOKENS, 16 * TOKENS), "host": (24 * TOKENS, 6 * TOKENS)}
    assert tokens(Readings(cache).traffic()) == whole, "the tiers that there are"


def test_a_block_that_was_there_already_is_nobodys_store(cache):
    session = cache.open_session(Role.SCHEDULER, "e", 0, 1, MANIFEST)
    keys = chain("document", 3)
    for tenant in ("first", "second"):
        cache.commit(session, b"", keys, cache.reserve(session, 3, 0), tenant)
    assert [(one.tenant, one.stored_blocks) for one in Readings(cache).tenants()] == [("first", 3)]


def series(metrics, name):
    """Return the values of a metric by its labels."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_tenants_have_series_of_their_own_up_to_a_limit():
    metrics, tenants = Metrics(), Tenants(Accounts())
    metrics.add_tenants(tenants.readings)
    for number in range(TENANT_LABELS_AT_MOST + 50):
        tenants.tally(f"t{number}").count(Asked(f"t{number}", 10, 2, 5), 16)
    tokens = series(metrics, "kvtier_tenant_tokens_asked_total")
    assert len(tokens) == TENANT_LABELS_AT_MOST + 1
    assert tokens["t0",] == 160
    assert tokens["other",] == 50 * 160
    hit = series(metrics, "kvtier_tenant_tokens_hit_total")
    assert (hit["t7", "device"], hit["t7", "host"], hit["other", "host"]) == (32, 80, 50 * 80)


def test_bytes_of_a_tenant_are_told_of_the_tiers_that_a_server_has():
    accounts = Accounts()
    tenants = Tenants(accounts)
    tenants.tally("a").lookups += 1
    accounts.of("a").charge(Tier.HOST, 4096)
    metrics = Metrics([Tier.DISK])
    metrics.add_tenants(tenants.readings)
    assert series(metrics, "kvtier_tenant_bytes") == {("a", "host"): 4096, ("a", "disk"): 0}


def test_a_tenant_that_is_called_other_is_counted_with_the_others():
    metrics, tenants = Metrics(), Tenants(Accounts())
    metrics.add_tenants(tenants.readings)
    tenants.tally("other").stored_blocks += 1
    tenants.tally("").stored_blocks += 2
    assert series(metrics, "kvtier_tenant_stored_blocks_total") == {("other",): 1, ("",): 2}
