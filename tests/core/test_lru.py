"""The LRU policy against an independent model: a plain list, coldest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvtier.policies import LRU

KEYS = [bytes([number]) for number in range(12)]
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("insert"), st.sampled_from(KEYS), st.one_of(st.none(), st.sampled_from(KEYS))
        ),
        st.tuples(
            st.just("touch"), st.lists(st.sampled_from(KEYS), unique=True, max_size=5), st.none()
        ),
        st.tuples(st.just("remove"), st.sampled_from(KEYS), st.none()),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_order_is_that_of_a_plain_list(operations):
    policy, model = LRU(), []
    for name, what, parent in operations:
        if name == "insert" and what not in model:
            policy.insert(what, 7, parent)
            model.insert(model.index(parent) if parent in model else len(model), what)
        elif name == "touch":
            policy.touch(what)
            used = [key for key in reversed(what) if key in model]
            model = [key for key in model if key not in used] + used
        elif name == "remove" and what in model:
            policy.remove(what)
            model.remove(what)
        assert list(policy.victims()) == model
        assert len(policy) == len(model)
        assert all(key in policy for key in model)


@given(OPERATIONS)
def test_a_swap_keeps_the_order(operations):
    policy = LRU()
    for name, what, parent in operations:
        if name == "insert" and what not in policy:
            policy.insert(what, 7, parent)
    heir = LRU()
    heir.adopt(policy.export())
    assert list(heir.victims()) == list(policy.victims())
    assert heir.export() == policy.export()


def test_a_chain_is_colder_at_its_tail():
    policy = LRU()
    for key, parent in zip(KEYS[:4], [None, *KEYS[:3]], strict=True):
        policy.insert(key, 1, parent)
    assert list(policy.victims()) == KEYS[3::-1]
    policy.touch(KEYS[:3])
    assert list(policy.victims()) == [KEYS[3], *KEYS[2::-1]]


def test_what_was_just_yielded_may_be_removed():
    policy = LRU()
    for key in KEYS:
        policy.insert(key, 1, None)
    for key in policy.victims():
        policy.remove(key)
    assert len(policy) == 0
