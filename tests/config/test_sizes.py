"""Sizes: strings with units, and nothing else; the memory of the machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier.sizes import UNITS, format_size, machine_memory, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1KiB", 1024),
        ("20GiB", 20 * 2**30),
        ("20 GiB", 20 * 2**30),
        ("20GB", 20 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("0.25MB", 250_000),
    ],
)
def test_a_size_has_the_bytes_that_its_unit_says(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("wrong", "example"),
    [
        ("5", "5GiB"),
        (5, "5GiB"),
        (5.5, "5GiB"),
        ("10%", "10GiB"),
        ("20G", "20GiB"),
        ("20gib", "20GiB"),
        ("20GIB", "20GiB"),
        ("20 g", "20GiB"),
        ("-1", "4GiB"),
        ("-1GiB", "4GiB"),
        ("+1GiB", "4GiB"),
        ("0", "4GiB"),
        (0, "4GiB"),
        ("0GiB", "4GiB"),
        ("1e3GiB", "1GiB"),
        ("1,5GiB", "1GiB"),
        ("1.2345GiB", "1GiB"),
        ("GiB", "4GiB"),
        ("", "4GiB"),
        (None, "4GiB"),
        (True, "4GiB"),
        (["1GiB"], "4GiB"),
    ],
)
def test_what_is_no_size_is_refused_with_an_example_that_is_one(wrong, example):
    with pytest.raises(ValueError, match=f'for example "{example}"'):
        parse_size(wrong)
    assert parse_size(example)


@given(st.integers(1, 999_999), st.integers(0, 999), st.sampled_from(sorted(UNITS)))
def test_a_size_reads_back_as_it_was_written(whole, decimals, unit):
    size = parse_size(f"{whole}.{decimals:03}{unit}")
    assert parse_size(format_size(size)) == size


def make_proc(folder, group="/kv/pod"):
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text("MemTotal:       1000 kB\nMemFree:        500 kB\n")
    (folder / "proc/self/cgroup").write_text(f"4:memory:/old\n0::{group}\n")
    (folder / "cgroup" / group.lstrip("/")).mkdir(parents=True)
    return folder / "proc", folder / "cgroup"


def test_the_machine_bounds_memory_where_no_group_does(tmp_path):
    proc, cgroups = make_proc(tmp_path)
    (cgroups / "kv/pod/memory.max").write_text("max\n")
    assert machine_memory(proc, cgroups) == (1000 * 1024, "the machine's memory")


@pytest.mark.parametrize("limited", ["kv/pod", "kv", "."])
def test_the_lowest_limit_of_a_control_group_bounds_memory(tmp_path, limited):
    proc, cgroups = make_proc(tmp_path)
    (cgroups / "kv/pod/memory.max").write_text("900000\n")
    (cgroups / limited / "memory.max").write_text("4096\n")
    memory, bound = machine_memory(proc, cgroups)
    assert memory == 4096
    assert "control group" in bound


def test_a_limit_above_the_machine_does_not_count(tmp_path):
    proc, cgroups = make_proc(tmp_path)
    (cgroups / "kv/pod/memory.max").write_text(f"{2**60}\n")
    assert machine_memory(proc, cgroups)[0] == 1000 * 1024
