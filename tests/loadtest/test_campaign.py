"""A campaign takes systems through their stages, and keeps what it measured whatever goes wrong."""

import asyncio
import contextlib
import itertools
import json
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import faults
import pytest
from runs import labelled

from loadtest.campaign import conduct, plan, results
from loadtest.campaign.conduct import Failed, Leg, Load
from loadtest.campaign.stages import (
    COLD,
    FORGOTTEN,
    HOST_EMPTIED,
    OTHER_FAULTS,
    REDIS_FAULTS,
    STAGES,
    Fault,
)
from loadtest.model import REPOSITORY
from loadtest.peers import Setup, Tiers
from loadtest.stack import StackError
from loadtest.traffic.hardware import hardware
from loadtest.traffic.requests import Request, Workload
from loadtest.traffic.runner import Closed
from loadtest.traffic.summary import load

REQUESTS = 6
ASKED = Workload(
    "made", "", 1, tuple(Request(f"r{n}", (faults.GOOD, n, 7, 7, 7), 3) for n in range(REQUESTS))
)


@pytest.fixture
def url():
    """Run a server of completions in a thread; its URL."""
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()
    found = []

    async def serve():
        async with faults.serving() as started:
            found.append(started.url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait(10)
    yield found[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()


@dataclass
class Driven:
    """Stands for a system: it is asked at a URL, and remembers what was done to it."""

    engine: SimpleNamespace
    done: list[str] = field(default_factory=list)
    fails_at: str = ""

    def __getattr__(self, name):
        def do(*_):
            self.done.append(name)
            if name == self.fails_at:
                raise StackError(f"{name} went wrong.")

        return do

    def settings(self):
        return {"known": True}

    def counts_at(self):
        return ()


def drive(monkeypatch, url, **given):
    (peer,) = drive_all(monkeypatch, kvtier=Driven(SimpleNamespace(url=url), **given))
    return peer


def drive_all(monkeypatch, **peers):
    @contextlib.contextmanager
    def running(name, setup):
        peer = peers[name]
        peer.done.append(f"start {name}")
        try:
            yield peer
        finally:
            peer.done.append("stop")

    monkeypatch.setattr(conduct, "running", running)
    return peers.values()


def leg(*loads):
    return Leg("ours", "kvtier", Setup(None, Tiers.DISK), loads)


def other_leg(*loads):
    return Leg("other", "lmcache", Setup(None, Tiers.DISK), loads)


def test_stages_come_in_order_and_each_run_is_kept_as_it_ends(monkeypatch, tmp_path, url):
    peer = drive(monkeypatch, url)
    made = leg(Load(ASKED, Closed(2), (COLD, FORGOTTEN, FORGOTTEN)))
    seen = []
    for found in conduct.conduct([made], tmp_path, lambda _: None):
        seen.append(found.scenario)
        assert len(list(tmp_path.rglob("raw.jsonl"))) == len(seen)
    assert seen == ["made: cold", "made: L0 emptied", "made: L0 emptied"]
    assert peer.done == [
        "start kvtier", "settle", "forget_device", "settle", "forget_device", "stop",
    ]  # fmt: skip
    assert made.runs == 3
    kept = load(tmp_path / "made-l0-emptied" / "ours-2")
    assert len(kept.run.records) == REQUESTS
    assert json.loads((tmp_path / "ours-disk.settings.json").read_text()) == {"known": True}


def test_a_fault_strikes_once_half_way_in_the_last_stage_and_is_mended(monkeypatch, tmp_path, url):
    peer = drive(monkeypatch, url)
    ended = []
    fault = Fault("made up", lambda p: p.strikes(), lambda p: p.mends())
    monkeypatch.setattr(
        conduct, "save", lambda found, where: ended.append((found.scenario, list(peer.done)))
    )
    made = leg(Load(ASKED, Closed(1), (COLD, HOST_EMPTIED), "beside a fault", fault))
    list(conduct.conduct([made], tmp_path, lambda _: None))
    (_, before), (scenario, after) = ended
    assert "strikes" not in before
    assert after[-3:] == ["drop_host", "strikes", "mends"]
    assert scenario == "made beside a fault: L1 emptied"


def test_a_stage_that_fails_ends_its_leg_and_loses_nothing(monkeypatch, tmp_path, url):
    peer = drive(monkeypatch, url, fails_at="drop_host")
    made = leg(Load(ASKED, Closed(1), (COLD, HOST_EMPTIED, FORGOTTEN)))
    run, failed = conduct.conduct([made], tmp_path, lambda _: None)
    assert run.scenario == "made: cold"
    assert failed == Failed("ours", "made: L1 emptied", "drop_host went wrong.")
    assert peer.done[-1] == "stop"
    page = results.write(tmp_path, "quick", [run], [failed], hardware(tmp_path))
    assert "drop_host went wrong." in page.read_text()


def spans(run):
    return [(each.sent + run.run.began, each.ended + run.run.began) for each in run.run.records]


def test_systems_of_a_group_are_asked_request_by_request_in_each_stage(monkeypatch, tmp_path, url):
    peers = drive_all(
        monkeypatch,
        kvtier=Driven(SimpleNamespace(url=url)),
        lmcache=Driven(SimpleNamespace(url=url)),
    )
    longer = Load(ASKED, Closed(1), (COLD, FORGOTTEN))
    group = [leg(longer), other_leg(Load(ASKED, Closed(1), (COLD,)))]
    runs = list(conduct.conduct(group, tmp_path, lambda _: None))
    assert [(each.system, each.scenario) for each in runs] == [
        ("ours", "made: cold"), ("other", "made: cold"), ("ours", "made: L0 emptied"),
    ]  # fmt: skip
    ours, other, _ = runs
    both = sorted([(*span, "ours") for span in spans(ours)] + [(*s, "other") for s in spans(other)])
    assert [name for *_, name in both] == ["ours", "other"] * REQUESTS
    assert all(end <= begin for (_, end, _), (begin, *_) in itertools.pairwise(both))
    busy = sum(end - begin for begin, end in spans(ours))
    assert ours.run.seconds == pytest.approx(busy, rel=0.5)
    assert [peer.done[-1] for peer in peers] == ["stop", "stop"]


def test_where_users_overlap_a_whole_run_is_one_turn(monkeypatch, tmp_path, url):
    systems = {name: Driven(SimpleNamespace(url=url)) for name in ("kvtier", "lmcache")}
    drive_all(monkeypatch, **systems)
    load_ = Load(ASKED, Closed(2), (COLD,))
    ours, other = conduct.conduct([leg(load_), other_leg(load_)], tmp_path, lambda _: None)
    assert max(end for _, end in spans(ours)) <= min(begin for begin, _ in spans(other))


def test_a_system_that_fails_leaves_the_others_of_its_group_alone(monkeypatch, tmp_path, url):
    ours = Driven(SimpleNamespace(url=url), fails_at="drop_host")
    other = Driven(SimpleNamespace(url=url))
    drive_all(monkeypatch, kvtier=ours, lmcache=other)
    load_ = Load(ASKED, Closed(1), (COLD, HOST_EMPTIED, FORGOTTEN))
    found = list(conduct.conduct([leg(load_), other_leg(load_)], tmp_path, lambda _: None))
    failed = Failed("ours", "made: L1 emptied", "drop_host went wrong.")
    assert [each for each in found if isinstance(each, Failed)] == [failed]
    assert [each.scenario for each in found if each is not failed and each.system == "other"] == [
        "made: cold", "made: L1 emptied", "made: L0 emptied",
    ]  # fmt: skip
    assert "stop" in ours.done
    assert "forget_device" in other.done


def test_the_table_has_medians_and_ratios_of_equal_requests():
    ours, peer = plan.NAMES["kvtier"], plan.NAMES["lmcache"]
    runs = [labelled(ours, scale=1.0), labelled(peer, scale=2.0), labelled(ours, "alone")]
    head, _, warm, alone = results.table(runs).splitlines()
    assert head == f"| asked | {ours} | {peer} | {ours} ÷ {peer} |"
    assert warm == (
        "| warm | 2.5 s (1.75 to 3.25), 40% cached | 5 s (3.5 to 6.5), 40% cached"
        " | 0.50 (0.50 to 0.50) |"
    )
    assert alone == "| alone | 2.5 s (1.75 to 3.25), 40% cached | - | - |"


def test_plans_fit_the_model_and_no_two_loads_are_called_the_same(tmp_path):
    library = pytest.importorskip("tokenizers")
    words = library.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")
    made = library.Tokenizer(words)
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    for each in (plan.quick(tmp_path), plan.full(tmp_path, [])):
        told = set()
        for one in each.legs:
            for load_ in one.loads:
                key = (one.system, one.peer, one.setup.tiers, load_.workload.name, load_.about)
                assert key not in told
                told.add(key)
        for group in each.groups:
            longest = max(group, key=lambda one: one.runs)
            for one in group:
                for mine, most in zip(one.loads, longest.loads, strict=True):
                    assert (mine.workload, mine.loop) == (most.workload, most.loop)
                    assert mine.stages == most.stages[: len(mine.stages)]
        assert each.runs == sum(len(load_.stages) for one in each.legs for load_ in one.loads)


def test_the_document_says_what_is_done_in_each_stage_and_fault():
    lines = (REPOSITORY / "docs" / "benchmarks.md").read_text("utf-8").splitlines()
    told = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    for named in (STAGES, (*REDIS_FAULTS, *OTHER_FAULTS)):
        first = told.index(named[0].name)
        assert told[first : first + len(named)] == [each.name for each in named]
