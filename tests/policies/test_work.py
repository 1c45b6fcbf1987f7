"""What a policy does at once is bounded, however many blocks there are: its lines are counted."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import kvtier.policies
import pytest
from kvtier.policies import POLICIES
from support import chain

FOLDER = str(Path(kvtier.policies.__file__).parent)
PIECE = 64
FEW, MANY = 512, 4096
"""Blocks, eight times as many in the second case."""
BOUNDED = sorted(POLICIES.keys() - {"s3fifo"})
"""S3-FIFO looks for its victims: it passes over a block once for each use, three times at most."""


@contextmanager
def counted():
    """Count the lines of policies' code that run."""
    lines = [0]

    def line(frame, event, argument):
        lines[0] += event == "line"
        return line

    def call(frame, event, argument):
        return line if frame.f_code.co_filename.startswith(FOLDER) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield lines
    finally:
        sys.settrace(before)


def work(pieces):
    """Return the most lines that one of these calls took."""
    most = 0
    for piece in pieces:
        with counted() as lines:
            piece()
        most = max(most, lines[0])
    return most


def filled(name, blocks, length):
    """Return a policy that holds chains which were used again and again, and the chains."""
    policy = POLICIES[name]()
    chains = [chain(f"{number}", length) for number in range(blocks // length)]
    for keys in chains:
        policy.touch(keys)
        policy.insert(keys, 4096, None)
    for _ in range(3):
        for keys in chains:
            policy.touch(keys)
    return policy, chains


def most_in_a_drop(name, blocks, length):
    """Return the most work of a piece of a drop, and of what comes in after it."""
    policy, _ = filled(name, blocks, length)

    def drop():
        for key in islice(policy.victims(), PIECE):
            policy.remove(key)

    def go_on():
        keys = chain(f"new {len(policy)}", 4)
        policy.touch(keys)
        policy.insert(keys, 4096, None)

    dropped = work([drop] * (blocks // PIECE - 1))
    return max(dropped, work([go_on] * 8))


@pytest.mark.parametrize("length", [1, 32])
@pytest.mark.parametrize("name", BOUNDED)
def test_no_piece_of_a_drop_takes_more_where_there_are_more_blocks(name, length):
    few, many = (most_in_a_drop(name, blocks, length) for blocks in (FEW, MANY))
    assert many < 2 * few, "logarithms may grow"


@pytest.mark.parametrize("name", BOUNDED)
def test_the_first_eviction_after_many_uses_takes_no_more_than_others(name):
    """Uses leave nothing behind that the next one who asks for victims has to clear away."""

    def first(blocks):
        policy, chains = filled(name, blocks, 1)
        for keys in chains:
            policy.touch(keys)
        return work([lambda: policy.make_room(1, lambda key: True)])

    assert first(MANY) < 2 * first(FEW)
