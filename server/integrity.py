"""The invariants of the hierarchy, checked as a whole: for tests and for a debugging operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .accounts import Account, Orders
from .core import SLOT_INDEX_BITS, BlockKey, SlotRef, Tier
from .directory import Block, Namespace
from .hierarchy import Hierarchy


def check_integrity(hierarchy: Hierarchy) -> None:
    """Raise AssertionError if slots, leases or the policy's bookkeeping disagree. O(blocks)."""
    for space in hierarchy.directory.namespaces.values():
        _check_slots(hierarchy, space)
        _check_leases(hierarchy, space)
        policy = space.pool.policy
        assert len(policy) == len(space.blocks), "the policy knows exactly the visible blocks"
        assert all(key in policy for key in space.blocks), "and no other ones"
        assert all(key in space.blocks for key in space.uses), "uses are of heads that are there"
        _check_children(space)
        owned = {key: block.owner for key, block in space.blocks.items()}
        _check_orders(hierarchy, space.orders, owned)
    _check_pins(hierarchy)
    for lower in hierarchy.lowers:
        _check_orders(hierarchy, lower.index.orders, lower.index.owners())
    _check_accounts(hierarchy)


def _check_orders(hierarchy: Hierarchy, orders: Orders, owned: Mapping[BlockKey, Account]) -> None:
    for account in hierarchy.accounts:
        own = {key for key, owner in owned.items() if owner is account}
        known = orders.known(account)
        assert known == (own if account.quota else set()), "who has a quota has an order of its own"


def _check_accounts(hierarchy: Hierarchy) -> None:
    used: Counter[tuple[Account, Tier]] = Counter()
    for space in hierarchy.directory.namespaces.values():
        for block in space.blocks.values():
            used[block.owner, Tier.HOST] += space.pool.slot_bytes
    for lower in hierarchy.lowers:
        for owner, size in lower.index.charged():
            used[owner, lower.tier] += size
    for account in hierarchy.accounts:
        for tier, size in account.used.items():
            assert size == used[account, tier], "a tenant's bytes are those of its blocks"


def _check_slots(hierarchy: Hierarchy, space: Namespace) -> None:
    pool = space.pool
    whole = [
        SlotRef(number, index).packed
        for number, owned in pool.slabs.items()
        for index in range(owned.slots)
    ]
    held = hierarchy.held_slots(space)
    closing = {number for number, owned in pool.slabs.items() if owned.closing}
    whole = [slot for slot in whole if slot >> SLOT_INDEX_BITS not in closing or slot in held]
    assert sorted([*pool.free, *held]) == sorted(whole), "slots free + held = total, each once"
    taken = Counter(slot >> SLOT_INDEX_BITS for slot in held)
    for number, owned in pool.slabs.items():
        assert owned.used == taken[number], "a slab counts its taken slots"


def _check_children(space: Namespace) -> None:
    children = Counter(block.parent for block in space.blocks.values())
    for block in [*space.blocks.values(), *space.anchors.values()]:
        assert block.children == children.pop(block, 0), "children are those that are visible"
        if (after := block.next) is not None:
            assert space.blocks.get(after.key) is after, "what comes next is visible"
            assert after.parent is block, "and continues this one"
    assert not children.keys() - {None}, "a parent is visible or an anchor"
    assert all(anchor.children for anchor in space.anchors.values()), "an anchor has children"


def _check_pins(hierarchy: Hierarchy) -> None:
    sizes: dict[Block, int] = {}
    for pin in hierarchy.pins:
        sizes |= dict.fromkeys(pin.blocks, pin.space.pool.slot_bytes)
        assert pin.blocks, "a pin holds something"
        keys = [block.key for block in pin.blocks]
        assert pin.space.prefix(keys, 0) == pin.blocks, "what is pinned is visible"
    assert hierarchy.pins.pinned_bytes == sum(sizes.values()), "each pinned block counts once"


def _check_leases(hierarchy: Hierarchy, space: Namespace) -> None:
    held: Counter[Block] = Counter()
    for engine in hierarchy.roster.engines.values():
        for session in engine.sessions.values():
            if session.space is space:
                for blocks in session.leases.values():
                    held.update(blocks)
        for lost in engine.limbo:
            held.update(lost.leased if lost.space is space else ())
    held.update(block for _, block in hierarchy.cascade.writing)
    for prefetch in hierarchy.prefetches.active:
        held.update(prefetch.blocks if prefetch.space is space else ())
    for pin in hierarchy.pins.of(space):
        held.update(pin.blocks)
    for block in [*space.blocks.values(), *space.doomed]:
        assert block.leases == held[block], "leases are those of sessions and limbo"
    assert all(block.leases for block in space.doomed), "a dropped block waits only for leases"
