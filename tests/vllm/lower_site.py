"""A server with lower tiers and an engine, for end-to-end tests of L2, and prompts stored there.

A `Site` is one engine, which lasts, and the server at its socket, which comes and goes. A `Shelf`
is what a server left on disk and in Redis: tests begin with copies of it and an empty memory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from harness import BLOCK, no_leaks, prompt
from inprocess import Ask
from support import until

sys.path[:0] = [str(Path(__file__).parents[1] / "tiers")]  # for redis_servers.py

from redis_servers import redis_server

DECODE = 24
BLOCKS = 4
"""Whole blocks of each prompt on the shelf; with its answer it still has no more."""
SHELVED = 24
"""Prompts on the shelf."""
BACK_SECONDS = 40.0
"""Longest wait for a tier that is well again: probes become rare while it is not."""
CAPACITY = {"capacity": "64MiB"}

STORE_NOTHING = {"kv_transfer_params": {"kvtier": {"store": False}}}
HELLO = Ask(prompt(99, BLOCK + 3), sampling={"max_tokens": 1, "extra_args": STORE_NOTHING})
"""Asks for one block, and leaves nothing."""

NOTE_KEYS = """
side = scheduler_side()
matched_tokens, noted = side.matched_tokens, []

def noting(request, computed):
    noted.append([[*request.prompt_token_ids], [key.hex() for key in request.block_hashes]])
    return matched_tokens(request, computed)

side.matched_tokens = noting
result = None
"""
NOTED = """
side.matched_tokens = matched_tokens
result = noted
"""


class Site:
    """One engine and the server at its socket, which comes and goes.

    `options` go to the server's command line, `settings` into its settings file, by section.
    """

    def __init__(self, lab, name, *options, engine=None, **settings):
        self._lab = lab
        self._options = tuple(map(str, options))
        self._settings = {"host": CAPACITY} | settings
        self._name = name
        self.start()
        self.engine = engine or lab.local_engine(self.server.socket)

    def start(self, **settings):
        """Start a server; `settings` are of its own, instead of sections of the site's."""
        self._settings |= settings
        file = self._lab.folder / f"{self._name}.yaml"
        file.write_text(json.dumps(self._settings, default=str))
        self.server = self._lab.server("--config", str(file), *self._options, name=self._name)
        return self.server

    def kill(self):
        """End the server at once."""
        self.server.stop(signal.SIGKILL)

    def restart(self, **settings):
        """Forget memory: a new server on the same socket, and nothing in the device."""
        self.server.stop()
        self.start(**settings)
        self.meet()

    def meet(self):
        """Wait until the engine knows the server, and the server what it has."""

        def met():
            self.engine.forget()
            self.engine.generate([HELLO])  # It asks the server, and so finds out that it is new.
            return len(self.json("/v1/sessions")) == 2

        until(met, "the engine's sessions")
        until(lambda: all(each["lower"]["scanned"] for each in self.lowers()), "the scan")

    def ask(self, asked):
        """Return the answer to a prompt of which the device has nothing."""
        self.engine.forget()
        return self.engine.complete(asked, DECODE)

    def steps_until(self, done, what):
        """Take steps of the engine until `done`; return the answers that ended, by request."""
        found = {}

        def stepped():
            found.update(self.engine.step())
            return done()

        until(stepped, what)
        return found

    # What the server says.

    def json(self, path):
        return json.loads(self.server.get(path))

    def tier(self, name):
        return self.json(f"/v1/tiers/{name}")

    def lowers(self):
        return [each for each in self.json("/v1/tiers") if each["lower"]]

    def up(self, tier):
        """Whether the tier is asked now, by both the API and the metric, which must agree."""
        said = []

        def agreed():
            said[:] = [self.tier(tier)["lower"]["up"]]
            return said[0] == self.count("tier_up", tier=tier)

        until(agreed, "what API and metrics both say")
        return said[0]

    def holds(self, tier, blocks):
        """Wait until a tier has so many blocks."""
        until(lambda: self.tier(tier)["blocks"] == blocks, f"{blocks} blocks in {tier}")

    def quiet(self):
        """Wait until nothing is to be written."""

        def waiting():
            return sum(each["lower"]["queued_write_bytes"] for each in self.lowers())

        until(lambda: not waiting(), "the writes", BACK_SECONDS)

    def hits(self):
        return {each["tier"]: each["tokens_hit"] for each in self.json("/v1/stats")["traffic"]}

    def count(self, name, **labels):
        """Return the sum of a metric `kvtier_<name>` over all labels but the given ones."""
        given = [f'{label}="{value}"' for label, value in labels.items()]
        total = 0.0
        for line in self.server.get("/metrics").splitlines():
            series, _, value = line.rpartition(" ")
            here, _, rest = series.partition("{")
            if here == f"kvtier_{name}" and all(each in rest for each in given):
                total += float(value)
        return int(total)

    def reads(self, outcome, tier="disk"):
        return self.count("reads_total", tier=tier, outcome=outcome)

    def writes(self, outcome, tier="disk"):
        return self.count("writes_total", tier=tier, outcome=outcome)

    def faults(self, fault, tier="disk"):
        return self.count("tier_faults_total", tier=tier, fault=fault)

    # What tests claim over and over.

    def answers_cold(self, pages, cached=None):
        """Ask for pages of a shelf at the same time; all answers are the cold ones.

        Returns how many prompt tokens of each were not computed; `cached` is what that must be.
        """
        self.engine.forget()
        found = self.engine.complete_all([page.asked for page in pages], DECODE)
        assert [each.tokens for each in found] == [page.cold for page in pages]
        hits = [each.cached for each in found]
        assert cached is None or hits == [cached] * len(pages), hits
        return hits

    def comes_back(self, tier, pages):
        """Wait until the tier is asked again, and serves all of at least the last of `pages`."""
        until(lambda: self.up(tier), f"the {tier} tier", BACK_SECONDS)
        for page in pages:
            if self.answers_cold([page]) == [BLOCKS * BLOCK]:
                break
        else:
            raise AssertionError(f"no prompt came from {tier} as a whole")
        no_leaks(self.server, self.engine)


@dataclass(frozen=True)
class Page:
    """A prompt whose whole blocks a lower tier has: its right answer, and its blocks' keys."""

    asked: list[int]
    cold: list[int]
    keys: list[str]
    """In hex."""


@dataclass(frozen=True)
class Shelf:
    """Pages, the directory that has them, and the records that Redis had, as dumps by name."""

    pages: list[Page]
    blocks: Path
    dumps: dict[bytes, bytes]

    def copy(self, to):
        """Return the path of a copy of the directory."""
        return Path(shutil.copytree(self.blocks, to))

    def fill(self, redis):
        """Give a Redis all pages."""
        for name, dump in self.dumps.items():
            redis.ask("RESTORE", name, 0, dump)


def filled_shelf(lab, engine, plain, folder):
    """Store prompts through a server, and end it."""
    asked = [prompt(100 + n, BLOCKS * BLOCK + 1 + n % 7) for n in range(SHELVED)]
    cold = plain.complete_all(asked, DECODE)
    dumps = {}
    with ExitStack() as stack:
        settings = {"disk": {"path": folder / "blocks"}}
        if shutil.which("redis-server"):
            redis = stack.enter_context(redis_server(folder / "redis"))
            settings["redis"] = {"url": redis.url, "timeout_seconds": 10}
        site = Site(lab, "site", engine=engine, **settings)
        stack.callback(site.server.stop)
        site.meet()
        engine.run(NOTE_KEYS)
        stored = engine.complete_all(asked, DECODE)
        noted = {tuple(tokens): keys for tokens, keys in engine.run(NOTED)}
        engine.run("result = None")
        assert [each.tokens for each in stored] == [each.tokens for each in cold]
        for each in site.lowers():
            site.holds(each["tier"], SHELVED * BLOCKS)
        if "redis" in settings:
            dumps = {name: redis.ask("DUMP", name) for name in redis.ask("KEYS", "kvtier:*")}
    pages = [
        Page(tokens, answer.tokens, noted[tuple(tokens)][:BLOCKS])
        for tokens, answer in zip(asked, cold, strict=True)
    ]
    return Shelf(pages, folder / "blocks", dumps)


def file_of(blocks, key):
    """Return the file of a key in a directory that has one namespace."""
    [space] = [each for each in blocks.iterdir() if each.is_dir()]
    return space / key[:2] / f"{key}.kv"


def ended(pid):
    """Whether there is no such process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
