"""Each policy once more, as plainly as it can be said: dictionaries and lists, and no speed.

Lists run from cold to hot. A model is told of requests, and names the victim of each eviction.
"""

from __future__ import annotations

WEIGHT = 10


class Model:
    """What the models share: residents with their parents, and ghosts of the last `share`."""

    share = 0

    def __init__(self):
        self.parents = {}
        self.uses = {}
        self.ghosts = {}

    def request(self, chain):
        self.touch([key for key in chain if key in self.parents])
        parent = None
        for key in chain:
            if key not in self.parents:
                self.parents[key] = parent
                self.insert(key, parent)
            parent = key

    def evict(self, leased):
        """Return the next victim outside `leased`, evicted, or None."""
        victim = self.victim(leased)
        if victim is not None:
            room = int(self.share * len(self.parents))
            uses = self.remove(victim)
            if uses:
                self.ghosts.pop(victim, None)
                self.ghosts[victim] = uses
                excess = len(self.ghosts) - room
                if excess > room // 16:
                    for key in list(self.ghosts)[:excess]:
                        del self.ghosts[key]
        return victim

    def remove(self, key):
        """Forget a block. Returns its uses, as a ghost would keep them; 0 if it would not."""
        del self.parents[key]
        return self.uses.pop(key, 1)

    def leaf(self, key):
        return key not in self.parents.values()

    def touch(self, chain):
        for key in chain:
            self.uses[key] += 1


class Ordered(Model):
    """Policies whose blocks stand in lists, read one after the other."""

    def __init__(self, lists=1):
        super().__init__()
        self.lists = [[] for _ in range(lists)]

    def at(self, key):
        return next(number for number, keys in enumerate(self.lists) if key in keys)

    def put(self, key, number, below=None):
        keys = self.lists[number]
        keys.insert(keys.index(below) if below in keys else len(keys), key)

    def take(self, key):
        self.lists[self.at(key)].remove(key)

    def remove(self, key):
        self.take(key)
        return super().remove(key)

    def victim(self, leased):
        return next((key for keys in self.lists for key in keys if key not in leased), None)


class LRUModel(Ordered):
    def insert(self, key, parent):
        self.uses[key] = 1
        self.put(key, 0, parent)

    def touch(self, chain):
        super().touch(chain)
        for key in reversed(chain):
            self.take(key)
            self.put(key, 0)


class SLRUModel(Ordered):
    share = 1

    def __init__(self):
        super().__init__(2)

    def insert(self, key, parent):
        seen = self.ghosts.pop(key, 0)
        self.uses[key] = seen + 1
        self.put(key, int(seen > 0 and (parent is None or self.at(parent) == 1)), parent)

    def touch(self, chain):
        super().touch(chain)
        while len(self.lists[1]) > 0.8 * len(self.parents):
            self.lists[0].append(self.lists[1].pop(0))
        for key in reversed(chain):
            self.take(key)
            self.put(key, 1)


class MQModel(Ordered):
    share = 4
    life = 1.0

    def __init__(self):
        super().__init__(8)
        self.now = 0
        self.stamp = 0
        self.since = {}

    def settle(self):
        oldest = self.now - self.life * len(self.parents)
        for level in range(1, 8):
            while self.lists[level] and self.since[self.lists[level][0]] < oldest:
                key = self.lists[level].pop(0)
                self.lists[level - 1].append(key)
                self.since[key] = self.now

    def insert(self, key, parent):
        uses = self.ghosts.pop(key, 0) + 1
        level = uses.bit_length() - 1
        if parent is not None:
            uses = min(uses, self.uses[parent])
            level = min(uses.bit_length() - 1, self.at(parent))
        self.uses[key] = uses
        self.put(key, level, parent)
        self.now += 1
        if self.now - self.stamp > 64:
            self.stamp = self.now
        self.since[key] = self.stamp

    def touch(self, chain):
        self.settle()
        super().touch(chain)
        self.stamp = self.now
        least = 7
        levels = {}
        for key in chain:
            least = levels[key] = min(least, self.uses[key].bit_length() - 1)
            self.since[key] = self.stamp
            self.take(key)
        for key in reversed(chain):
            self.put(key, levels[key])
        self.now += len(chain)

    def victim(self, leased):
        self.settle()
        return super().victim(leased)


class FIFOModel(Ordered):
    def __init__(self):
        super().__init__()
        self.newest = None
        self.parked = set()

    def insert(self, key, parent):
        follows = parent is not None and parent == self.newest and parent not in self.parked
        self.put(key, 0, parent if follows else None)
        self.newest = key

    def touch(self, chain):
        pass

    def victim(self, leased):
        for key in list(self.lists[0]):
            if not self.leaf(key):
                self.lists[0].remove(key)
                self.parked.add(key)
            elif key not in leased:
                return key
        return None

    def remove(self, key):
        place = self.lists[0].index(key)
        self.lists[0].remove(key)
        parent = self.parents.pop(key)
        if parent in self.parked and self.leaf(parent):
            self.parked.discard(parent)
            self.lists[0].insert(place, parent)
        if key == self.newest:
            self.newest = None
        return 0


class GDSFModel(Model):
    def __init__(self):
        super().__init__()
        self.worth, self.floor, self.entry, self.entries = {}, 0.0, {}, 0
        self.came, self.requests = {}, 0

    def depth(self, key):
        parent = self.parents[key]
        return 0 if parent is None else 1 + self.depth(parent)

    def density(self, key):
        return self.uses[key] * (1 + self.depth(key) / 2048) / WEIGHT

    def enter(self, key):
        self.entries += 1
        self.entry[key] = self.entries

    def insert(self, key, parent):
        self.uses[key] = 1
        self.came[key] = self.requests
        self.worth[key] = self.floor + self.density(key)
        self.enter(key)

    def touch(self, chain):
        self.requests += 1
        super().touch(chain)
        for key in reversed(chain):
            self.worth[key] = self.floor + self.density(key)
            self.enter(key)

    def victim(self, leased):
        leaves = [key for key in self.parents if self.leaf(key)]
        while True:
            order = sorted(leaves, key=lambda key: (self.worth[key], self.entry[key]))
            for key in order:
                now = self.floor + self.density(key)
                if self.came[key] == self.requests and self.worth[key] < now:
                    self.worth[key] = now
                    self.enter(key)
                    break
                if key not in leased:
                    return key
            else:
                return None

    def evict(self, leased):
        victim = self.victim(leased)
        if victim is not None:
            self.floor = max(self.floor, self.worth[victim])
            self.remove(victim)
        return victim

    def remove(self, key):
        parent = self.parents[key]
        super().remove(key)
        if parent is not None and self.leaf(parent):
            self.enter(parent)
        return 0
