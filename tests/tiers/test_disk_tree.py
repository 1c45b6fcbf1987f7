"""The directory of the disk store: whose it is, what it takes, and what a scan tells."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from contract import (
    KEY,
    memory,
    payload_of,
    read,
    space_of,
    stored,
    whole,
)
from disks import OLD, Account, du, file_of, store_at
from kvtier.core import PAGE_BYTES, Fault, ReadOutcome
from kvtier.tiers import files
from kvtier.tiers.base import Listing, Space, TierFault
from kvtier.tiers.disk import DiskStore
from kvtier.tiers.tree import MANIFEST, MARKER
from support import chain, manifest

# What the store takes.


def test_what_the_store_says_it_takes_is_what_du_says_after_every_step(store, path):
    space, other = space_of(PAGE_BYTES), space_of(3 * PAGE_BYTES, "other")
    account = Account(store)

    def agrees(step):
        assert account.total == du(path), step

    account.scan()
    agrees("an empty store")
    crowd = [b"\x07" + key[1:] for key in chain("crowd", 72)]
    for key in crowd:
        account.write(space, key)
        agrees("blocks that make their folder grow")
    for key in chain("spread", 12):
        account.write(other, key)
        agrees("a second namespace")
    for _ in range(100):
        account.write(space, crowd[0])
    agrees("one block a hundred times")
    for key in crowd[:40]:
        account.drop(space, key)
    agrees("dropped blocks")
    account.scan()
    agrees("a scan")
    store.wipe(space.digest)
    account.scan()
    agrees("a wiped namespace")
    for key in crowd:
        account.write(space, key)
    agrees("the namespace filled again")
    fresh = Account(store_at(path))
    fresh.scan()
    assert fresh.total == account.total == du(path)


def test_a_refill_right_after_a_wipe_is_counted_once(store, space, path):
    account = Account(store)
    account.scan()
    account.write(space, KEY)
    store.wipe(space.digest)
    account.write(space, KEY)
    assert account.total == du(path)
    account.scan()
    assert account.total == du(path)


def test_a_corrupt_file_is_gone_from_the_medium(store, space, path):
    account = Account(store)
    account.scan()
    account.write(space, KEY)
    os.truncate(file_of(store, space, KEY), PAGE_BYTES)
    assert read(store, space, KEY) is ReadOutcome.CORRUPT
    del account.records[space.digest, KEY]
    assert account.total == du(path)


# Scans and restarts.


def test_a_new_server_finds_every_record_that_an_old_one_wrote(store, space, path):
    keys = chain("old", 40)
    stored(store, space, *keys)
    found = {held.key: held for listing in store_at(path).scan() for held in listing.records}
    assert found.keys() == set(keys)
    for key in keys:
        status = file_of(store, space, key).stat()
        assert found[key].record_bytes == status.st_blocks * 512
        assert found[key].used == status.st_mtime


def test_a_listing_has_what_begins_with_its_byte(store, space):
    stored(store, space, *chain("bytes", 40))
    for listing in store.scan():
        assert {held.key[0] for held in listing.records} <= {listing.first}


def test_a_read_is_a_use_that_a_restart_remembers(store, space, path):
    stored(store, space, KEY)
    os.utime(file_of(store, space, KEY), OLD)
    assert read(store, space, KEY) == whole(space, KEY)
    [used] = [held.used for listing in store_at(path).scan() for held in listing.records]
    assert used > OLD[1]


def _aged(store: DiskStore) -> None:
    """Make all folders look as if they had not changed for long."""
    for folder in store.options.path.rglob("*/"):
        os.utime(folder, OLD)


def test_a_scan_leaves_out_what_did_not_change(store, space):
    stored(store, space, *chain("settled", 20), KEY)
    _aged(store)
    assert any(listing.records for listing in list(store.scan()))
    assert list(store.scan()) == []
    store.drop(space.digest, [KEY])
    assert [(each.namespace, each.first) for each in store.scan()] == [(space.digest, KEY[0])]


def test_what_changed_a_moment_ago_is_listed_again(store, space):
    stored(store, space, KEY)
    for _ in range(2):
        assert [KEY] in [[held.key for held in each.records] for each in store.scan()]


def test_a_scan_that_was_given_up_does_not_count(store, space):
    stored(store, space, KEY)
    _aged(store)
    next(iter(store.scan()))
    assert [KEY] in [[held.key for held in each.records] for each in store.scan()]


def test_a_folder_that_went_is_listed_as_empty_once(store, space, path):
    stored(store, space, KEY, bytes(32))
    _aged(store)
    list(store.scan())
    shutil.rmtree(path / space.digest)
    gone = [Listing(space.digest, 0, [], 0), Listing(space.digest, KEY[0], [], 0)]
    assert sorted(listing for listing in store.scan() if listing.namespace) == gone
    assert [listing for listing in store.scan() if listing.namespace] == []


def _leftover(folder: Path, name: str = "k") -> Path:
    file = files.temporary(folder, name)
    file.write_bytes(b"half a record")
    return file


def test_only_leftovers_that_are_old_are_removed(store, space, path):
    stored(store, space, KEY)
    folders = [path, path / space.digest, file_of(store, space, KEY).parent]
    old, young = ([_leftover(folder) for folder in folders] for _ in range(2))
    for file in old:
        os.utime(file, OLD)
    listings = list(store.scan())
    assert [held.key for listing in listings for held in listing.records] == [KEY]
    assert not any(file.exists() for file in old)
    assert all(file.exists() for file in young)


def test_a_folder_with_a_young_leftover_is_looked_at_until_it_is_gone(store, space):
    stored(store, space, KEY)
    file = _leftover(file_of(store, space, KEY).parent)
    _aged(store)
    list(store.scan())
    os.utime(file, OLD)
    list(store.scan())
    assert not file.exists()


def test_foreign_files_are_left_alone_and_told_of_once(store, space, path, caplog):
    stored(store, space, KEY)
    folder = file_of(store, space, KEY).parent
    names = ["notes.txt", f"{'0' * 64}.kv", f"{KEY.hex().upper()}.kv", f"{KEY.hex()[:-1]} .kv"]
    foreign = [folder / name for name in names]
    foreign += [path / "README", path / space.digest / "core", path / space.digest.upper()]
    for file in foreign:
        file.write_text("mine")
    (folder / f"{KEY[:1].hex()}{'0' * 62}.kv").mkdir()
    for _ in range(2):
        listings = list(store.scan())
        assert [held.key for listing in listings for held in listing.records] == [KEY]
    store.wipe(space.digest)
    assert all(file.read_text() == "mine" for file in foreign if file.suffix != ".kv")
    assert foreign[1].parent.is_dir()
    assert len(caplog.records) == 1


# The directory.


def test_a_directory_of_somebody_else_is_refused_and_stays_as_it_is(path):
    path.mkdir()
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(TierFault, match=r"thesis\.tex.*set disk\.path") as refused:
        store_at(path)
    assert refused.value.fault is Fault.UNREACHABLE
    assert [file.name for file in path.iterdir()] == ["thesis.tex"]


def test_a_store_of_another_version_is_refused(path):
    path.mkdir()
    (path / MARKER).write_text("kvtier disk store, format 9\n")
    with pytest.raises(TierFault, match="format 9"):
        store_at(path)


def test_a_file_is_no_directory(path):
    path.write_text("a file")
    with pytest.raises(TierFault, match=r"set disk\.path"):
        store_at(path)


def test_the_top_of_a_file_system_will_do(path):
    (path / "lost+found").mkdir(parents=True)
    store_at(path)


def test_only_this_user_sees_what_is_stored(store, space, path):
    stored(store, space, KEY)
    for each in [path, *path.rglob("*")]:
        assert not each.stat().st_mode & 0o077, each


def test_servers_may_start_on_a_new_directory_at_once(path, space):
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(store_at, [path] * 8))
    stored(stores[0], space, KEY)
    assert all(read(store, space, KEY) == whole(space, KEY) for store in stores)


def test_a_manifest_lies_beside_the_records(store, space, path):
    stored(store, space, KEY)
    assert (path / space.digest / MANIFEST).read_text() == space.manifest


ODD_NAMES = [
    "../../x",
    "a/b",
    "a%2fb",
    "a\\b",
    "nul\0",
    "n" * 300,
    "naïve 模型",
    "dot.",
    "dot",
    "",
    "..",
    "CON",
]


def test_names_do_not_reach_paths_whatever_they_are(store, path):
    spaces = []
    for name in ODD_NAMES:
        identity = manifest(model=name, weights=name)
        spaces.append(Space(identity.digest(), PAGE_BYTES, name))
    for space in spaces:
        store.write(space, KEY, b"", payload_of(space, space.digest))
    for space in spaces:
        assert read(store, space, KEY) == bytes(payload_of(space, space.digest))
    assert {listing.namespace for listing in store.scan()} == {
        "",
        *(space.digest for space in spaces),
    }
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    for space in spaces:
        store.wipe(space.digest)
    assert [each.name for each in path.iterdir()] == [MARKER]


@pytest.mark.parametrize("digest", ["", "..", "../x", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_namespace_that_is_no_digest_gets_nowhere(store, path, digest):
    space = Space(digest, PAGE_BYTES, "")
    calls = [
        lambda: store.find(space, [KEY]),
        lambda: store.read(space, KEY, memory(PAGE_BYTES)),
        lambda: store.write(space, KEY, b"", memory(PAGE_BYTES)),
        lambda: store.drop(digest, [KEY]),
        lambda: store.wipe(digest),
    ]
    for call in calls:
        with pytest.raises((AssertionError, ValueError)):
            call()
    assert [each.name for each in path.iterdir()] == [MARKER]


def test_a_key_that_is_no_whole_hash_gets_nowhere(store, space):
    with pytest.raises(AssertionError):
        store.drop(space.digest, [b"../"])


def test_a_wipe_also_removes_a_namespace_that_has_lost_its_manifest(store, space, path):
    stored(store, space, KEY)
    (path / space.digest / MANIFEST).unlink()
    store.wipe(space.digest)
    assert [each.name for each in path.iterdir()] == [MARKER]
