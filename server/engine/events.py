"""What happens to blocks in the server's tiers, as vLLM's KV cache events for routers.

The server tells of its whole namespace, so that a router learns of blocks that another engine
stored, too. Tokens, which a router needs to place a block by its prompt, are known of blocks that
this engine computed. Routers that saw the block in an engine's device know the others by hash.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

from ..core import KEY_BYTES, BlockKey, Tier
from ..protocol import Changed

BLOCKS_REMEMBERED = 65_536
KEYS_A_TAKE = 4096
"""About so many keys are looked at in one call, so that no engine step waits for a snapshot."""
LOCALITY = "LOCAL"
"""Blocks can be loaded by this engine: what a router may count on when it chooses it."""


class Content(NamedTuple):
    """What a block of this engine is made of."""

    tokens: array[int]
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None
    """What its hash covers beside tokens, as vLLM tags it."""


class Holding:
    """What one tier holds, as far as it was told.

    After a snapshot began, older knowledge is doubtful. It counts until there is time to drop it.
    """

    def __init__(self) -> None:
        self.keys: set[BlockKey] = set()
        self.doubtful: set[BlockKey] = set()

    def doubt(self) -> None:
        """Let everything be doubtful."""
        if self.doubtful:
            self.doubtful |= self.keys
        else:
            self.doubtful = self.keys
        self.keys = set()

    def put(self, key: BlockKey) -> None:
        """Hold a block, beyond doubt."""
        self.doubtful.discard(key)
        self.keys.add(key)

    def drop(self, key: BlockKey) -> None:
        """Hold a block no more."""
        self.doubtful.discard(key)
        self.keys.discard(key)


class Medium:
    """Tiers that vLLM's events call by one name: a block is there if one of them holds it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tiers: dict[Tier, Holding] = {}
        self._before: dict[BlockKey, bool] = {}
        """Of what changed since the last look: whether it was there."""
        self._parents: dict[BlockKey, BlockKey] = {}

    def __contains__(self, key: BlockKey) -> bool:
        for holding in self.tiers.values():
            if key in holding.keys or key in holding.doubtful:
                return True
        return False

    @property
    def doubts(self) -> bool:
        """Whether there is something to sweep."""
        return any(holding.doubtful for holding in self.tiers.values())

    def apply(self, change: Changed) -> int:
        """Take a frame to heart. Returns how many keys it had."""
        holding = self.tiers.setdefault(change.tier, Holding())
        if change.whole:
            holding.doubt()
        removed = list(_keys(change.removed))
        for key in removed:
            self._note(key)
            holding.drop(key)
        count = len(removed)
        for run in change.stored:
            parent = run.parent
            for key in _keys(run.keys):
                self._note(key)
                holding.put(key)
                self._parents[key] = parent
                parent = key
                count += 1
        return count

    def sweep(self, limit: int) -> int:
        """Drop at most `limit` blocks that no snapshot confirmed. Returns how many."""
        count = 0
        for holding in self.tiers.values():
            while holding.doubtful and count < limit:
                self._before.setdefault(holding.doubtful.pop(), True)
                count += 1
        return count

    def difference(self) -> tuple[list[BlockKey], dict[BlockKey, BlockKey]]:
        """Return what went, and what came with its parent, since the last look."""
        before, self._before = self._before, {}
        parents, self._parents = self._parents, {}
        went = [key for key, was in before.items() if was and key not in self]
        came = {key: parent for key, parent in parents.items() if not before[key] and key in self}
        return went, came

    def _note(self, key: BlockKey) -> None:
        if key not in self._before:
            self._before[key] = key in self


class EventFeed:
    """Makes vLLM's events of what the server tells. Nothing here waits."""

    def __init__(self, block_tokens: int, group_idx: int = 0, spec_kind: str | None = None) -> None:
        """`spec_kind`: what vLLM calls the kind of attention of the KV cache group."""
        self._block_tokens = block_tokens
        self._group_idx = group_idx
        self._spec_kind = spec_kind
        self._contents: OrderedDict[BlockKey, Content] = OrderedDict()
        self._told: deque[Changed] = deque()
        self._media = {name: Medium(name) for name in (MEDIUM_CPU, MEDIUM_STORAGE)}

    @property
    def behind(self) -> bool:
        """Whether a further `take` has more to say."""
        return bool(self._told) or any(medium.doubts for medium in self._media.values())

    def remember(self, request: Any, first: int, end: int) -> None:
        """Keep what the blocks `first` to `end` of vLLM's request are made of, for their events."""
        size, image = self._block_tokens, 0
        lora = None if request.lora_request is None else request.lora_request.name
        for position in range(first, end):
            start = position * size
            extra, image = generate_block_hash_extra_keys(request, start, start + size, image)
            tokens = array("I", request.all_token_ids[start : start + size])
            key = bytes(request.block_hashes[position])
            self._contents[key] = Content(tokens, lora, extra)
            self._contents.move_to_end(key)
        while len(self._contents) > BLOCKS_REMEMBERED:
            self._contents.popitem(last=False)

    def take(self, changes: Iterable[Changed]) -> list[KVCacheEvent]:
        """Return the events of these frames, or of so many as there is time for, in order."""
        self._told.extend(changes)
        if not self.behind:
            return []
        limit = KEYS_A_TAKE
        while self._told and limit > 0:
            change = self._told.popleft()
            limit -= self._medium(change.tier).apply(change)
        if not self._told:
            for medium in self._media.values():
                limit -= medium.sweep(limit)
        return [event for medium in self._media.values() for event in self._events(medium)]

    def lost(self) -> list[KVCacheEvent]:
        """Return the first events of the server's end: its blocks are gone. `take` has the rest."""
        self._told.clear()
        for medium in self._media.values():
            for holding in medium.tiers.values():
                holding.doubt()
        return self.take(())

    def _medium(self, tier: Tier) -> Medium:
        return self._media[MEDIUM_CPU if tier is Tier.HOST else MEDIUM_STORAGE]

    def _events(self, medium: Medium) -> Iterator[KVCacheEvent]:
        went, came = medium.difference()
        if went:
            yield BlockRemoved(
                block_hashes=[maybe_convert_block_hash(key) for key in went],
                medium=medium.name,
                group_idx=self._group_idx,
                locality=LOCALITY,
            )
        if unknown := [key for key in came if key not in self._contents]:
            # With a parent that it does not know, a router would pass over all of them.
            yield self._stored(medium.name, b"", unknown, [])
        known = {key: parent for key, parent in came.items() if key in self._contents}
        for parent, keys, contents in self._chains(known):
            yield self._stored(medium.name, parent, keys, contents)

    def _chains(
        self, parents: dict[BlockKey, BlockKey]
    ) -> Iterator[tuple[BlockKey, list[BlockKey], list[Content]]]:
        """Cut blocks into runs of one adapter, each block after its parent."""
        keys: list[BlockKey] = []
        contents: list[Content] = []
        head = b""
        for key in _parents_first(parents):
            content = self._contents[key]
            goes_on = keys and parents[key] == keys[-1]
            if not (goes_on and content.lora_name == contents[-1].lora_name):
                if keys:
                    yield head, keys, contents
                head, keys, contents = parents[key], [], []
            keys.append(key)
            contents.append(content)
        if keys:
            yield head, keys, contents

    def _stored(
        self, medium: str, parent: BlockKey, keys: Sequence[BlockKey], contents: Sequence[Content]
    ) -> BlockStored:
        """Return the event of a run; without contents, of blocks whose tokens nobody knows."""
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(key) for key in keys],
            parent_block_hash=maybe_convert_block_hash(parent) if parent else None,
            token_ids=[token for content in contents for token in content.tokens],
            block_size=self._block_tokens,
            lora_id=None,
            medium=medium,
            lora_name=contents[0].lora_name if contents else None,
            extra_keys=to_event_extra_keys([content.extra_keys for content in contents]),
            group_idx=self._group_idx,
            kv_cache_spec_kind=self._spec_kind,
            locality=LOCALITY,
        )


def _keys(chain: bytes) -> Iterator[BlockKey]:
    """Cut a byte string into keys. What is too short for one is left out."""
    for at in range(KEY_BYTES, len(chain) + 1, KEY_BYTES):
        yield chain[at - KEY_BYTES : at]


def _parents_first(parents: dict[BlockKey, BlockKey]) -> Iterator[BlockKey]:
    """Order blocks so that none comes before its parent; a snapshot has them in no order."""
    done: set[BlockKey] = set()
    for one in parents:
        line = []
        key = one
        while key in parents and key not in done:
            done.add(key)
            line.append(key)
            key = parents[key]
        yield from reversed(line)
