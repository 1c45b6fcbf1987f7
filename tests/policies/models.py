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


class Queued(Model):
    """Two lists in which whoever is next to go and has children is parked until it has none."""

    def __init__(self):
        super().__init__()
        self.lists = ([], [])
        self.which = {}
        self.parked = set()

    def size(self, number):
        return sum(each == number for each in self.which.values())

    def move(self, key, number):
        self.parked.discard(key)
        for keys in self.lists:
            if key in keys:
                keys.remove(key)
        self.lists[number].append(key)
        self.which[key] = number

    def put(self, key, number, below=None):
        keys = self.lists[number]
        keys.insert(keys.index(below) if below in keys else len(keys), key)
        self.which[key] = number

    def park(self, key):
        self.lists[self.which[key]].remove(key)
        self.parked.add(key)

    def remove(self, key):
        number = self.which.pop(key)
        place = self.lists[number].index(key)
        self.lists[number].remove(key)
        parent = self.parents[key]
        uses = super().remove(key)
        if parent in self.parked and self.leaf(parent):
            self.parked.discard(parent)
            self.unpark(parent, number, place)
        return self.as_ghost(number, uses)

    def victim(self, leased):
        while True:
            passed = set()
            before = len(self.parents)
            while True:
                first = self.first()
                for number in (first, 1 - first):
                    keys = [key for key in self.lists[number] if key not in passed]
                    if keys:
                        break
                else:
                    return None
                key = keys[0]
                if self.spare(key):
                    continue
                if not self.leaf(key):
                    self.park(key)
                elif key in leased:
                    passed.add(key)
                else:
                    return key
                assert len(self.parents) == before


class S3FIFOModel(Queued):
    share = 1

    def __init__(self):
        super().__init__()
        self.rounds = {}
        self.newest = None

    def first(self):
        return 0 if 8 * self.size(0) > len(self.parents) else 1

    def insert(self, key, parent):
        self.uses[key] = 1
        self.rounds[key] = 0
        number = 1 if self.ghosts.pop(key, 0) else 0
        above = parent
        while number and above is not None and self.which[above] == 0:
            self.move(above, 1)
            self.rounds[above] = 0
            above = self.parents[above]
        self.put(key, number, parent if parent == self.newest else None)
        self.newest = key

    def touch(self, chain):
        for key in chain:
            self.rounds[key] = min(self.rounds[key] + 1, 3)

    def spare(self, key):
        if not self.rounds[key]:
            return False
        self.rounds[key] = 0 if self.which[key] == 0 else self.rounds[key] - 1
        self.move(key, 1)
        return True

    def unpark(self, parent, number, place):
        self.lists[self.which[parent]].append(parent)

    def as_ghost(self, number, uses):
        return 1 if number == 0 else 0

    def remove(self, key):
        if key == self.newest:
            self.newest = None
        return super().remove(key)


class ARCModel(Queued):
    def __init__(self):
        super().__init__()
        self.target = 0.0
        self.seen = ([], [])
        """Ghosts of blocks used once, and of blocks used again."""

    def first(self):
        return 0 if WEIGHT * self.size(0) > self.target else 1

    def insert(self, key, parent):
        self.uses[key] = 1
        total = WEIGHT * len(self.which)
        for number, ghosts in enumerate(self.seen):
            if key in ghosts:
                self.uses[key] = 2
                ghosts.remove(key)
                other = self.seen[1 - number]
                step = WEIGHT * max(1.0, len(other) / (len(ghosts) + 1))
                raised = min(self.target + step, total)
                self.target = max(self.target - step, 0.0) if number else raised
        again = self.uses[key] > 1 and (parent is None or self.which[parent] == 1)
        self.put(key, int(again), parent)

    def touch(self, chain):
        super().touch(chain)
        for key in reversed(chain):
            self.move(key, 1)

    def spare(self, key):
        return False

    def unpark(self, parent, number, place):
        same = self.which[parent] == number
        self.lists[self.which[parent]].insert(place if same else 0, parent)

    def as_ghost(self, number, uses):
        return 0

    def evict(self, leased):
        victim = self.victim(leased)
        if victim is not None:
            most = len(self.parents)
            held = self.size(0) / most
            number = 1 if self.which[victim] else 0
            self.remove(victim)
            self.seen[number].append(victim)
            self.trim(number, most)
            self.trim(0, int(most * (1.0 - held)))
            self.trim(1, max(most - len(self.seen[0]), 0))
        return victim

    def trim(self, number, most):
        ghosts = self.seen[number]
        if len(ghosts) - most > most // 16:
            del ghosts[: len(ghosts) - most]
