"""Random requests over a small tree of chains, and a tier that serves them from few blocks."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

BRANCHES = 3
DEPTH = 5


def key_of(path):
    """Return the key of the block at the end of a path from the root."""
    return bytes(path).rjust(DEPTH + 1, b"\xff")


def chain_of(path):
    """Return the chain of keys that leads to the end of a path."""
    return [key_of(path[: length + 1]) for length in range(len(path))]


PATHS = st.lists(st.integers(0, BRANCHES - 1), min_size=1, max_size=DEPTH).map(tuple)
STEPS = st.one_of(
    st.tuples(st.just("request"), PATHS, st.integers(0, 3)),
    st.tuples(st.just("evict"), st.integers(1, 4), st.integers(0, 3)),
    st.tuples(st.just("drop"), PATHS, st.just(0)),
)
HISTORIES = st.lists(STEPS, max_size=60)


class Tier:
    """Residents of a tier under a policy, as the hierarchy drives it; without a bound itself."""

    def __init__(self, policy):
        self.policy = policy
        self.parents = {}
        """The key of each resident block's parent, None where that was not resident."""

    def request(self, path):
        chain = chain_of(path)
        self.policy.touch(chain)
        parent = None
        for key in chain:
            if key not in self.parents:
                self.policy.insert([key], 10, parent)
                self.parents[key] = parent
            parent = key

    def evict(self, count, leased=frozenset()):
        """Evict up to `count` blocks, passing over leased ones. Returns their keys in order."""
        gone = []
        if not count:
            return gone
        for key in self.policy.victims():
            if key in leased:
                continue
            self.policy.evict(key)
            self.forget(key)
            gone.append(key)
            if len(gone) == count:
                break
        return gone

    def drop(self, path):
        """Drop a block, if it is there and nothing continues it."""
        key = key_of(path)
        if key in self.parents and not self.children(key):
            self.policy.remove(key)
            self.forget(key)

    def forget(self, key):
        assert not self.children(key), "a parent never goes before its resident children"
        del self.parents[key]

    @property
    def torn(self):
        return any(parent not in self.parents for parent in self.parents.values() if parent)

    def parent_of(self, key):
        return self.parents.get(key)

    def children(self, key):
        return [child for child, parent in self.parents.items() if parent == key]

    def run(self, step):
        """Carry out one step. Returns the keys that it evicted."""
        name, what, more = step
        if name == "request":
            self.request(what)
        elif name == "evict":
            return self.evict(what, frozenset([*self.parents][: more if more > 2 else 0]))
        else:
            self.drop(what)
        return []

    def check_integrity(self):
        assert len(self.policy) == len(self.parents)
        assert all(key in self.policy for key in self.parents)
        assert key_of((9,)) not in self.policy


def long_history(seed, steps=300):
    """Return a history that goes on long enough for ghosts to come back and uses to add up."""
    random = Random(seed)
    history = []
    for _ in range(steps):
        path = tuple(
            random.choices(range(BRANCHES), (5, 2, 1))[0] for _ in range(random.randint(1, DEPTH))
        )
        kind = random.choices(("request", "evict", "drop"), (12, 6, 1))[0]
        what = random.randint(1, 8) if kind == "evict" else path
        history.append((kind, what, random.randint(0, 3)))
    return history


class TierThatKnowsParents(Tier):
    """The same, but its policy may ask it for parents."""

    def __init__(self, policy):
        super().__init__(policy)
        policy.follow(self)


class TierAtOnce(Tier):
    """The same, but it tells the policy of several blocks with one call, as the server does."""

    def request(self, path):
        chain = chain_of(path)
        self.policy.touch(chain)
        filled = self.policy.fill(chain, self.policy.leading(chain), 10)
        parent = None
        new = 0
        for key in chain:
            new += key not in self.parents
            self.parents.setdefault(key, parent)
            parent = key
        assert filled == new

    def evict(self, count, leased=frozenset()):
        gone = []

        def goes(key):
            if key in leased:
                return False
            self.forget(key)
            gone.append(key)
            return True

        assert self.policy.make_room(count, goes) == len(gone) <= count
        return gone
