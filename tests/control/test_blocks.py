"""Blocks, pins and prefixes over HTTP and as commands: real servers, real engines' clients."""

import json
import random
import threading
import time

import pytest
from control.sites import BLOCK, CAPACITY, SPACE, Site, keys_of, tokens
from kvtier import protocol as wire
from kvtier.core import PAGE_BYTES
from kvtier.hashing import seed_digest
from support import manifest, until
from tiers.redis_servers import needs_redis, redis_server

pytestmark = pytest.mark.slow


@pytest.fixture
def sites(serve):
    """Start servers with a client each."""
    opened = []

    def start(*arguments, space=SPACE, **more):
        options = arguments if "--capacity" in arguments else ("--capacity", "1MiB", *arguments)
        opened.append(Site(serve(*options, **more), space))
        return opened[-1]

    yield start
    for site in opened:
        site.client.close()


@pytest.fixture
def site(sites):
    return sites()


def problem(answer, status, *parts):
    assert answer[0] == status, answer
    assert answer[1]["status"] == status
    for part in parts:
        assert part in answer[1]["detail"]


# Lookup.


def test_a_lookup_by_tokens_finds_what_an_engine_stored_and_counts_as_nothing(site):
    prompt = tokens(1, 6)
    site.store(keys_of(prompt)[:4])
    before = site.served.json("/v1/stats")
    found = site.lookup(prompt)
    assert found == {
        "namespace": SPACE.digest(),
        "block_tokens": BLOCK,
        "blocks": 6,
        "matched_blocks": 4,
        "matched_tokens": 4 * BLOCK,
        "tiers": [{"tier": "host", "blocks": 4, "ranges": [[0, 4]], "known": True}],
    }
    assert site.served.json("/v1/stats") == before
    assert site.served.json("/v1/sessions")[0]["leased_blocks"] == 0


def test_a_salt_is_in_the_keys(site):
    prompt = tokens(1, 3)
    site.store(keys_of(prompt, salt="acme"))
    assert site.lookup(prompt)["matched_blocks"] == 0
    assert site.lookup(prompt, salt="acme")["matched_blocks"] == 3


def test_keys_do_without_tokens_and_gaps_are_shown(site):
    keys = keys_of(tokens(1, 6))
    site.store(keys[:2])
    site.store(keys[3:5], keys[2])
    body = {"keys": [key.hex() for key in keys]}
    found = site.good("POST", "/v1/blocks/lookup", body)
    assert found["matched_blocks"] == 2
    assert found["tiers"][0]["ranges"] == [[0, 2], [3, 5]]


def test_a_seed_that_nobody_can_know_is_asked_for(sites):
    site = sites(space=manifest(hash_seed=seed_digest("4711")))
    prompt = tokens(1, 2)
    site.store(keys_of(prompt, seed="4711"))
    path = "/v1/blocks/lookup"
    problem(site.call("POST", path, {"tokens": prompt}), 409, "hash_seed", "PYTHONHASHSEED")
    wrong = {"tokens": prompt, "hash_seed": "1"}
    problem(site.call("POST", path, wrong), 409, "another one")
    assert site.lookup(prompt, hash_seed="4711")["matched_blocks"] == 2


def test_a_namespace_is_named_by_its_first_digits(site):
    site.store(keys_of(tokens(1, 2)))
    assert site.lookup(tokens(1, 2), namespace=SPACE.digest()[:6])["matched_blocks"] == 2
    for name in (SPACE.digest()[:5], "ffffff", ""):
        body = {"tokens": [1], "namespace": name}
        problem(site.call("POST", "/v1/blocks/lookup", body), 404, SPACE.digest()[:12])


def test_what_is_no_prompt_is_refused(site):
    wrong = [
        {},
        {"tokens": [1], "keys": []},
        {"tokens": [-1]},
        {"tokens": [1.5]},
        {"tokens": ["1"]},
        {"keys": ["ab"]},
        {"tokens": [1], "more": 1},
        {"tokens": [1], "namespace": 4},
    ]
    for body in wrong:
        problem(site.call("POST", "/v1/blocks/lookup", body), 422)


def test_lookups_tell_of_lower_tiers_too(sites, tmp_path):
    site = sites("--disk", tmp_path / "disk", KVTIER_DISK__ADMISSION="always")
    prompt = tokens(1, 5)
    site.store(keys_of(prompt))
    until(lambda: site.held(prompt, "disk") == [[0, 5]], "the writes")
    site.good("POST", "/v1/blocks/drop", {"tokens": prompt[: 3 * BLOCK], "tier": "host"})
    assert site.held(prompt) == [[0, 2]]
    found = site.lookup(prompt)
    assert (found["matched_blocks"], found["matched_tokens"]) == (5, 5 * BLOCK)


# Drop.


def test_a_drop_takes_a_block_with_all_that_continues_it_and_a_dry_run_nothing(site):
    trunk, branch = tokens(1, 6), tokens(1, 3)[: 3 * BLOCK] + tokens(2, 4)
    site.store(keys_of(trunk))
    fork = keys_of(branch)
    site.store(fork[3:], fork[2])
    other = keys_of(tokens(3, 2))
    site.store(other)
    body = {"tokens": trunk[: 3 * BLOCK + 4], "dry_run": True}
    found = site.good("POST", "/v1/blocks/drop", body)
    gone = [{"tier": "host", "blocks": 8, "bytes": 8 * PAGE_BYTES}]
    assert found == {"namespace": SPACE.digest(), "done": True, "dry_run": True, "gone": gone}
    assert site.blocks() == 12
    found = site.good("POST", "/v1/blocks/drop", body | {"dry_run": False})
    assert found["gone"] == gone
    assert site.held(trunk) == [[0, 2]]
    assert site.blocks() == 4
    assert site.find(other) == 2


def test_a_namespace_is_dropped_as_a_whole_and_only_by_name(site):
    for seed in range(3):
        site.store(keys_of(tokens(seed, 5)))
    problem(site.call("POST", "/v1/blocks/drop", {}), 422, "name the namespace")
    found = site.good("POST", "/v1/blocks/drop", {"namespace": SPACE.digest()})
    assert found["gone"][0]["blocks"] == 15
    assert site.blocks() == 0
    problem(
        site.call("POST", "/v1/blocks/drop", {"namespace": SPACE.digest(), "tier": "disk"}),
        404,
        "disk",
        "host",
    )


def test_a_leased_block_is_dropped_at_once_and_its_slot_is_free_with_the_last_lease(site):
    prompt = tokens(1, 4)
    keys = keys_of(prompt)
    site.store(keys)
    found = site.client.lookup(b"".join(keys), 0)
    assert len(found.slots) == 4
    site.good("POST", "/v1/blocks/drop", {"tokens": prompt, "tier": "host"})
    assert site.held(prompt) == [[0, 3]]
    slots = site.served.json("/v1/tiers/host")["host"]["slots"]
    assert slots["committed"] == 4
    site.client.send(wire.Step(0, releases=[found.seq]))

    def freed():
        return site.served.json("/v1/tiers/host")["host"]["slots"]["committed"] == 3

    until(freed, "the slot")


def test_a_drop_reaches_lower_tiers(sites, tmp_path):
    site = sites("--disk", tmp_path / "disk", KVTIER_DISK__ADMISSION="always")
    kept, dropped = tokens(1, 3), tokens(2, 4)
    site.store(keys_of(kept))
    site.store(keys_of(dropped))
    until(lambda: site.blocks("disk") == 7, "the writes")
    body = {"tokens": dropped[:BLOCK]}
    found = site.good("POST", "/v1/blocks/drop", body)
    assert [(gone["tier"], gone["blocks"]) for gone in found["gone"]] == [("host", 4), ("disk", 4)]
    assert site.find(keys_of(dropped)) == 0
    assert site.find(keys_of(kept)) == 3
    until(lambda: len(list((tmp_path / "disk").glob("**/*.kv"))) == 3, "the files' end")
    found = site.good("POST", "/v1/blocks/drop", {"namespace": SPACE.digest(), "tier": "disk"})
    assert [(gone["tier"], gone["blocks"]) for gone in found["gone"]] == [("disk", 3)]
    assert site.find(keys_of(kept)) == 3
    until(lambda: not list((tmp_path / "disk").glob("**/*.kv")), "the last file's end")


# Pins.


def test_a_pinned_prefix_stays_under_pressure_until_it_is_unpinned(site):
    prompt = tokens(1, 8)
    site.store(keys_of(prompt))
    pin = site.good("POST", "/v1/pins", {"tokens": prompt, "ttl_seconds": 600, "name": "system"})
    assert (pin["blocks"], pin["tokens"], pin["name"]) == (8, 8 * BLOCK, "system")
    for seed in range(100, 160):
        site.store(keys_of(tokens(seed, 10)))
    assert site.held(prompt) == [[0, 8]]
    listed = site.good("GET", "/v1/pins")
    assert [one["id"] for one in listed["pins"]] == [pin["id"]]
    assert listed["pinned_bytes"] == 8 * PAGE_BYTES
    assert 590 < listed["pins"][0]["expires_in_seconds"] <= 600
    assert "kvtier_pinned_bytes 32768.0" in site.served.get("/metrics")[1]
    host = site.served.json("/v1/tiers/host")["host"]
    assert (host["pinned_bytes"], host["pins_at_most_bytes"]) == (8 * PAGE_BYTES, CAPACITY // 4)
    assert site.call("DELETE", f"/v1/pins/{pin['id']}") == (204, None)
    problem(site.call("DELETE", f"/v1/pins/{pin['id']}"), 404, pin["id"])
    for seed in range(200, 260):
        site.store(keys_of(tokens(seed, 10)))
    assert site.held(prompt) == []


def test_a_pin_ends_when_its_time_is_over(site):
    prompt = tokens(1, 2)
    site.store(keys_of(prompt))
    site.good("POST", "/v1/pins", {"tokens": prompt, "ttl_seconds": 0.2})
    assert site.good("GET", "/v1/pins")["pins"]
    until(lambda: not site.good("GET", "/v1/pins")["pins"], "the pin's end")
    assert site.good("GET", "/v1/pins")["pinned_bytes"] == 0


def test_pins_take_no_more_than_their_share(sites):
    site = sites(KVTIER_HOST__PIN_SHARE="0.05")
    prompts = [tokens(1, 8), tokens(2, 8)]
    for prompt in prompts:
        site.store(keys_of(prompt))
    site.good("POST", "/v1/pins", {"tokens": prompts[0], "ttl_seconds": 60})
    refused = site.call("POST", "/v1/pins", {"tokens": prompts[1], "ttl_seconds": 60})
    problem(refused, 409, "host.pin_share", "are free")
    patched = site.call("PATCH", "/v1/settings", {"changes": {"host.pin_share": 0.1}})
    assert patched[0] == 200, patched
    site.good("POST", "/v1/pins", {"tokens": prompts[1], "ttl_seconds": 60})
    nothing = site.call("POST", "/v1/pins", {"tokens": tokens(3, 2), "ttl_seconds": 60})
    problem(nothing, 409, "Nothing of this prefix")


def test_a_pin_outlives_a_smaller_tier_and_another_policy(site):
    prompt = tokens(1, 8)
    site.store(keys_of(prompt))
    site.good("POST", "/v1/pins", {"tokens": prompt, "ttl_seconds": 600})
    for seed in range(100, 130):
        site.store(keys_of(tokens(seed, 10)))
    changes = {"host.capacity": "512KiB", "host.policy": "fifo"}
    assert site.call("PATCH", "/v1/settings", {"changes": changes})[0] == 200

    def smaller():
        host = site.served.json("/v1/tiers/host")
        return host["used_bytes"] <= 512 << 10 and host["policy"] == "fifo"

    until(smaller, "the smaller tier")
    for seed in range(200, 230):
        site.store(keys_of(tokens(seed, 10)))
    assert site.held(prompt) == [[0, 8]]


def test_an_engines_reset_ends_pins(site):
    prompt = tokens(1, 3)
    site.store(keys_of(prompt))
    site.good("POST", "/v1/pins", {"tokens": prompt, "ttl_seconds": 60})
    assert site.client.reset().count == 3
    assert site.good("GET", "/v1/pins") == {
        "pinned_bytes": 0,
        "pins_at_most_bytes": CAPACITY // 4,
        "pins": [],
    }


# Prefetch and list.


def test_a_prefetch_brings_a_prefix_back_from_disk(sites, tmp_path):
    site = sites("--disk", tmp_path / "disk", KVTIER_DISK__ADMISSION="always")
    prompt = tokens(1, 12)
    site.store(keys_of(prompt))
    until(lambda: site.held(prompt, "disk") == [[0, 12]], "the writes")
    site.good("POST", "/v1/blocks/drop", {"tokens": prompt[:BLOCK], "tier": "host"})
    assert site.held(prompt) == []
    status, found = site.call("POST", "/v1/blocks/prefetch", {"tokens": prompt})
    assert (status, found["blocks"], found["on_their_way"]) == (202, 12, 12)
    until(lambda: site.held(prompt) == [[0, 12]], "the blocks")
    again = site.good("POST", "/v1/blocks/prefetch", {"tokens": prompt})
    assert again["on_their_way"] == 0
    assert site.served.json("/v1/tiers/host")["host"]["slots"]["promoting"] == 0


def test_the_list_has_the_largest_prefixes_first_a_page_at_a_time(site):
    sizes = {seed: 2 + seed for seed in range(5)}
    for seed, size in sizes.items():
        site.store(keys_of(tokens(seed, size)))
    site.find(keys_of(tokens(1, 3)))
    site.find(keys_of(tokens(1, 3)))
    found, cursor = [], ""
    while cursor is not None:
        page = site.good("GET", f"/v1/prefixes?limit=2{cursor and f'&cursor={cursor}'}")
        assert (page["total"], page["namespace"]) == (5, SPACE.digest())
        found += page["prefixes"]
        cursor = page["next"]
    assert [one["blocks"] for one in found] == [6, 5, 4, 3, 2]
    assert found[0] == {
        "head": keys_of(tokens(4, 6))[0].hex(),
        "parent": None,
        "blocks": 6,
        "bytes": 6 * PAGE_BYTES,
        "depth": 6,
        "ends": 1,
        "uses": 0,
        "pinned": False,
    }
    first = site.good("GET", "/v1/prefixes?order=uses&limit=1")["prefixes"][0]
    assert (first["head"], first["uses"]) == (keys_of(tokens(1, 3))[0].hex(), 2)
    problem(site.call("GET", "/v1/prefixes?cursor=x"), 422, "cursor")
    problem(site.call("GET", "/v1/prefixes?tier=disk"), 422)


def test_a_list_knows_where_chains_part(site):
    trunk, branch = tokens(1, 6), tokens(1, 3)[: 3 * BLOCK] + tokens(2, 5)
    site.store(keys_of(trunk))
    fork = keys_of(branch)
    site.store(fork[3:], fork[2])
    [one] = site.good("GET", "/v1/prefixes")["prefixes"]
    assert (one["blocks"], one["depth"], one["ends"]) == (11, 8, 2)


@needs_redis
def test_redis_is_asked_brought_from_and_dropped_from(sites, tmp_path):
    prompt = tokens(1, 6)
    keys = keys_of(prompt)
    with redis_server(tmp_path / "redis") as redis:
        one = sites("--redis", redis.url)
        one.store(keys)
        until(lambda: one.held(prompt, "redis") == [[0, 6]], "the writes")
        two = sites("--redis", redis.url, socket=tmp_path / "two.sock")
        found = two.lookup(prompt)
        assert found["matched_blocks"] == 6
        assert [tier["ranges"] for tier in found["tiers"]] == [[], [[0, 6]]]
        redis.ask("DEL", f"kvtier:{SPACE.digest()}:{keys[4].hex()}")
        assert two.held(prompt, "redis") == [[0, 4]]
        assert two.good("POST", "/v1/blocks/prefetch", {"tokens": prompt})["on_their_way"] == 4
        until(lambda: two.held(prompt) == [[0, 4]], "the blocks")
        gone = one.good("POST", "/v1/blocks/drop", {"tokens": prompt[: 2 * BLOCK]})["gone"]
        assert [tier["blocks"] for tier in gone] == [5, 5]
        until(lambda: two.held(prompt, "redis") == [[0, 1]], "the records' end")
        with redis.frozen():
            began = time.monotonic()
            tier = two.lookup(tokens(9, 2))["tiers"][1]
            assert (tier["known"], tier["blocks"]) == (False, 0)
            assert time.monotonic() - began < 3


# Commands.


@pytest.fixture
def prompt_file(tmp_path):
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(tokens(1, 6)))
    return file


def test_the_commands_do_what_the_routes_do(site, kvtier, prompt_file):
    site.store(keys_of(tokens(1, 6)))

    def run(*arguments):
        done = kvtier(*arguments, "--url", site.served.url, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    asked = ("--tokens-file", prompt_file)
    assert run("blocks", "lookup", *asked)["matched_blocks"] == 6
    pin = run("pins", "add", *asked, "--seconds", "60", "--name", "x")
    assert [one["id"] for one in run("pins", "list")["pins"]] == [pin["id"]]
    assert run("blocks", "list")["prefixes"][0]["pinned"]
    assert run("pins", "remove", pin["id"]) == {"removed": pin["id"]}
    assert run("blocks", "prefetch", *asked)["on_their_way"] == 0
    assert run("blocks", "drop", *asked, "--dry-run")["gone"][0]["blocks"] == 1
    assert run("blocks", "drop", "--namespace", SPACE.digest()[:8])["gone"][0]["blocks"] == 6
    assert site.blocks() == 0


def test_the_commands_speak_to_people(site, kvtier, prompt_file):
    site.store(keys_of(tokens(1, 6))[:4])
    url = ("--url", site.served.url)
    text = kvtier("blocks", "lookup", "--tokens-file", prompt_file, *url).stdout
    assert "6 blocks of 16 tokens; of these, the first 4 are there (64 tokens)" in text
    assert "0 to 3" in text
    assert "4 are there" not in kvtier("blocks", "list", *url).stdout
    refused = kvtier("blocks", "drop", *url)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "name the namespace" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokens-file", "nowhere"), "can't be read"),
        (("--text-file", "nowhere"), "needs --model"),
        (("--tokens-file", "x", "--key", "00"), "one way"),
    ],
)
def test_a_command_says_what_is_no_prompt(kvtier, arguments, said):
    done = kvtier("blocks", "lookup", *arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_text_is_tokenized_on_this_side(site, kvtier, tmp_path):
    library = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(200)} | {"[UNK]": 200}
    tokenizer = library.Tokenizer(library.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompt = [number % 200 for number in range(40)]
    (tmp_path / "prompt.txt").write_text(" ".join(f"w{number}" for number in prompt))
    site.store(keys_of(prompt))
    done = kvtier(
        "blocks", "lookup", "--model", tmp_path, "--text-file", tmp_path / "prompt.txt",
        "--url", site.served.url, "--json",
    )  # fmt: skip
    assert json.loads(done.stdout)["matched_blocks"] == 2


# The loop.


def test_engines_are_answered_while_much_is_walked_over_and_dropped(sites):
    site = sites("--capacity", "512MiB")
    generator = random.Random(1)
    chains = [[generator.randbytes(32) for _ in range(2000)] for _ in range(60)]
    stored = sum(site.store(keys) for keys in chains)
    answers, waits = [], []

    def work():
        answers.append(site.good("GET", "/v1/prefixes?limit=5"))
        answers.append(site.good("POST", "/v1/blocks/drop", {"namespace": SPACE.digest()}))

    operator = threading.Thread(target=work)
    operator.start()
    while operator.is_alive():
        before = time.monotonic()
        site.find(chains[0][:1])
        waits.append(time.monotonic() - before)
    assert (answers[0]["total"], answers[1]["gone"][0]["blocks"]) == (60, stored)
    assert max(waits) < 0.25, "seconds; on two idle cores the longest takes 0.007"
