"""The disk tier fails while an engine serves: no answer changes, and the tier is back by itself.

Redis is in test_lower_redis_faults.py, the end of a server in test_lower_ends.py.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import harness
import pytest
from harness import BLOCK, BLOCK_BYTES, no_leaks, prompt
from inprocess import Ask
from kvtier.codec import HEADER_PAGE_BYTES, unpack, verify
from lower_site import BLOCKS, DECODE, SHELVED, Site, file_of, filled_shelf
from support import until

sys.path[:0] = [str(Path(__file__).parents[1] / "tiers")]  # for disks.py

from disks import OLD, du, mount

WHOLE = BLOCKS * BLOCK
RECORD_BYTES = HEADER_PAGE_BYTES + BLOCK_BYTES
LEFT_BYTES = 20_000
"""Free on a full medium: no record fits, a probe does."""


@pytest.fixture(scope="module")
def engine(module_lab):
    return module_lab.local_engine(module_lab.folder / "site.sock")


@pytest.fixture(scope="module")
def shelf(module_lab, engine, plain, tmp_path_factory):
    return filled_shelf(module_lab, engine, plain, tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def site_at(module_lab, engine):
    """Start a server with a disk tier at a path; it ends with the test."""
    with harness.lab(module_lab.folder, module_lab.model) as lab:

        def start(path, mode="always", **disk):
            settings = {"disk": {"path": path, "keep_free": "4KiB"} | disk}
            site = Site(lab, "site", engine=engine, loads={"mode": mode}, **settings)
            site.meet()
            return site

        yield start


@pytest.fixture
def blocks(shelf, tmp_path):
    """A directory that has all pages of the shelf."""
    return shelf.copy(tmp_path / "blocks")


@pytest.fixture
def small(tmp_path):
    """The top of a file system of 16 MiB of its own."""
    top = tmp_path / "small"
    top.mkdir()
    mount("-t", "tmpfs", "-o", "size=16m", "kvtier-test", top)
    yield top
    subprocess.run(["umount", "-l", top], check=True)


def fresh(count, blocks=BLOCKS):
    """Return prompts that nobody has asked for yet."""
    numbers = fresh.__dict__.setdefault("numbers", iter(range(1000, 10_000)))
    return [prompt(next(numbers), blocks * BLOCK + 3) for _ in range(count)]


def answers(site, plain, asked):
    """Ask for prompts at the same time; the answers are the cold ones."""
    site.engine.forget()
    got = site.engine.complete_all(asked, DECODE)
    assert [each.tokens for each in got] == [
        each.tokens for each in plain.complete_all(asked, DECODE)
    ]


# Records that are not what they were.


def cut(file, other):
    os.truncate(file, file.stat().st_size // 2)


def empty(file, other):
    os.truncate(file, 0)


def flip(file, other):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)


def swap(file, other):
    aside = file.with_name("aside")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)


def delete(file, other):
    file.unlink()


def sound(file, key):
    """Whether a file is a whole record of a key."""
    content = memoryview(file.read_bytes())
    header = unpack(content)
    verify(header, content[HEADER_PAGE_BYTES : HEADER_PAGE_BYTES + header.stored_bytes])
    return header.key.hex() == key


@pytest.mark.parametrize("damage", [cut, empty, flip, swap, delete])
def test_a_record_that_is_not_what_it_was_ends_the_prefix_and_is_replaced(
    damage, site_at, blocks, shelf
):
    site = site_at(blocks)
    pages = iter(shelf.pages)
    outcome = "missing" if damage is delete else "corrupt"
    bad = 0
    for position in (0, 1, BLOCKS - 1):
        mine, other = next(pages), next(pages)
        file, spare = (file_of(blocks, page.keys[position]) for page in (mine, other))
        damage(file, spare)
        site.answers_cold([mine], cached=position * BLOCK)
        site.answers_cold([other], cached=position * BLOCK if damage is swap else WHOLE)
        site.quiet()
        bad += 2 if damage is swap else 1
        assert site.reads(outcome) == site.writes("written") == bad, "records that were replaced"
        assert sound(file, mine.keys[position])
        assert sound(spare, other.keys[position])
    assert site.reads("corrupt") + site.reads("missing") == bad
    assert site.up("disk")
    assert not site.count("tier_faults_total", tier="disk")
    no_leaks(site.server, site.engine)


@pytest.mark.parametrize("damage", [cut, delete])
def test_two_requests_that_share_a_lost_block_both_compute_it(
    damage, site_at, blocks, shelf, plain
):
    page = shelf.pages[0]
    site = site_at(blocks)
    damage(file_of(blocks, page.keys[1]), None)
    beside = page.asked[: 3 * BLOCK] + fresh(1)[0]
    answers(site, plain, [page.asked, beside, page.asked])
    assert site.reads("corrupt") + site.reads("missing") == 1
    assert site.reads("read") <= BLOCKS - 1
    site.answers_cold([page], cached=WHOLE)
    no_leaks(site.server, site.engine)


# A medium that fails.


@contextlib.contextmanager
def filled(top, left=0):
    """Fill a file system but for a few bytes."""
    file = top / "filling"
    medium = os.statvfs(top)
    with file.open("wb") as filling:
        os.posix_fallocate(filling.fileno(), 0, medium.f_bavail * medium.f_frsize - left)
    yield
    file.unlink()


def test_a_full_disk_still_serves_and_takes_blocks_once_there_is_room(small, site_at, shelf, plain):
    site = site_at(shelf.copy(small / "blocks"))
    with filled(small, LEFT_BYTES):
        answers(site, plain, fresh(8))
        site.quiet()
        assert site.faults("full") > 0
        assert site.writes("failed") + site.writes("full") > 0
        assert site.up("disk"), "what it holds can be read"
        site.answers_cold(shelf.pages[:4], cached=WHOLE)
    written = site.writes("written")

    def writes_again():
        answers(site, plain, fresh(1))
        site.quiet()
        return site.writes("written") >= written + BLOCKS

    until(writes_again, "writes", 30)
    no_leaks(site.server, site.engine)


def test_a_disk_without_any_room_at_the_start_serves_what_it_holds(small, site_at, shelf, plain):
    path = shelf.copy(small / "blocks")
    with filled(small):
        site = site_at(path)
        site.answers_cold(shelf.pages[:4], cached=WHOLE)
        assert site.up("disk")


@contextlib.contextmanager
def read_only(top):
    mount("-o", "remount,ro", top)
    yield
    mount("-o", "remount,rw", top)


def test_a_disk_that_becomes_read_only_still_serves_and_takes_blocks_again(
    small, site_at, shelf, plain
):
    site = site_at(shelf.copy(small / "blocks"))
    with read_only(small):
        answers(site, plain, fresh(4))
        site.quiet()
        assert site.faults("read_only") > 0
        site.answers_cold(shelf.pages[:4], cached=WHOLE)
        assert site.up("disk")
    written = site.writes("written")

    def writes_again():
        answers(site, plain, fresh(1))
        site.quiet()
        return site.writes("written") >= written + BLOCKS

    until(writes_again, "writes", 30)
    site.answers_cold(shelf.pages[4:8], cached=WHOLE)
    no_leaks(site.server, site.engine)


def test_a_disk_that_is_read_only_from_the_start_serves_what_it_holds(small, site_at, shelf, plain):
    path = shelf.copy(small / "blocks")
    with read_only(small):
        site = site_at(path)
        site.answers_cold(shelf.pages[:4], cached=WHOLE)
        answers(site, plain, fresh(2))
        assert site.faults("read_only") > 0
    written = site.writes("written")

    def writes_again():
        answers(site, plain, fresh(1))
        site.quiet()
        return site.writes("written") >= written + BLOCKS

    until(writes_again, "writes", 30)


def test_a_directory_that_is_deleted_is_made_again(site_at, blocks, shelf, plain):
    site = site_at(blocks)
    shutil.rmtree(blocks)
    assert site.answers_cold(shelf.pages[:6]) == [0] * 6
    until(lambda: site.faults("unreachable") > 0, "a fault")

    def writes_again():
        answers(site, plain, fresh(1))
        site.quiet()
        return site.up("disk") and site.writes("written") >= BLOCKS

    until(writes_again, "the tier", 40)
    until(lambda: site.tier("disk")["blocks"] == len([*blocks.rglob("*.kv")]), "a look", 20)
    assert site.answers_cold(shelf.pages[6:12]) == [0] * 6
    site.quiet()
    site.restart()
    site.answers_cold(shelf.pages[6:12], cached=WHOLE)
    no_leaks(site.server, site.engine)


@pytest.fixture
def frozen_disk(tmp_path):
    """The top of a file system whose writes hang while it is frozen, and how to freeze it."""
    top, image = tmp_path / "loop", tmp_path / "image"
    top.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    mount("-o", "loop", image, top)

    @contextlib.contextmanager
    def frozen():
        subprocess.run(["fsfreeze", "-f", top], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "-u", top], check=True)

    yield top, frozen
    subprocess.run(["umount", "-l", top], check=True)


def test_a_disk_that_hangs_is_left_alone_and_comes_back(frozen_disk, site_at, shelf, plain):
    top, frozen = frozen_disk
    site = site_at(shelf.copy(top / "blocks"))
    site.answers_cold(shelf.pages[:1], cached=WHOLE)
    with frozen():
        answers(site, plain, fresh(2))
        until(lambda: not site.up("disk"), "the breaker")
        assert site.faults("timeout") == 1
        waits = site.count("waits_total")
        site.answers_cold(shelf.pages[1:4], cached=0)
        assert site.count("waits_total") == waits, "a lookup waited for it"
    site.comes_back("disk", shelf.pages[4:])


# A server that dies.


def records(path):
    """Return what `du` counts, without what a killed server had begun and nobody took for old."""
    return du(path) - sum(each.stat().st_blocks * 512 for each in path.rglob(".*.tmp"))


def test_a_server_that_is_killed_as_it_writes_leaves_whole_records_within_its_budget(
    site_at, tmp_path, plain
):
    budget = 40 * RECORD_BYTES
    path = tmp_path / "blocks"
    site = site_at(path, capacity=f"{budget >> 10}KiB")
    asked = fresh(12)
    ids = site.engine.start([Ask(each, sampling={"max_tokens": DECODE}) for each in asked])
    found = site.steps_until(lambda: site.writes("written") >= 2 * BLOCKS, "writes")
    site.kill()
    found |= site.engine.drain()
    folders = [each for each in path.rglob("*") if each.is_dir()]
    assert records(path) <= budget + RECORD_BYTES + 4096 * len(folders)
    cold = [each.tokens for each in plain.complete_all(asked, DECODE)]
    assert [found[each].tokens for each in ids] == cold
    leftover = next(path.rglob("*.kv")).parent / f".{'a' * 64}.{'b' * 32}.tmp"
    leftover.write_bytes(bytes(RECORD_BYTES))
    os.utime(leftover, ns=OLD)
    site.start()
    site.meet()
    assert not leftover.exists()
    assert records(path) <= budget
    assert all(sound(file, file.stem) for file in path.rglob("*.kv"))
    held = site.tier("disk")["blocks"]
    assert held == len([*path.rglob("*.kv")]) > 0
    site.engine.forget()
    warm = site.engine.complete_all(asked, DECODE)
    assert [each.tokens for each in warm] == cold
    assert sum(each.cached for each in warm) > 0
    assert site.reads("corrupt") == 0
    site.quiet()
    until(lambda: site.tier("disk")["used_bytes"] == records(path), "the account", 20)
    assert records(path) <= budget
    no_leaks(site.server, site.engine)


# Recompute or load.


def test_nothing_is_loaded_where_loads_are_never_wanted(site_at, blocks, shelf):
    site = site_at(blocks, mode="never")
    site.answers_cold(shelf.pages, cached=0)
    assert not site.count("reads_total")
    assert not site.count("waits_total")
    no_leaks(site.server, site.engine)


def test_everything_is_loaded_where_loads_are_always_wanted(site_at, blocks, shelf):
    site = site_at(blocks)
    site.answers_cold(shelf.pages, cached=WHOLE)
    assert site.reads("read") == SHELVED * BLOCKS
    assert not site.count("loads_skipped_blocks_total")
    no_leaks(site.server, site.engine)
