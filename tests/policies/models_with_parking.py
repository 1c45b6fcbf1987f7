"""Plain models of the policies whose order alone does not keep chains whole."""

from __future__ import annotations

from models import WEIGHT, Model


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
