"""The control plane over a real uvicorn server, in front of a hierarchy that holds blocks."""

import asyncio
import contextlib
import shutil
import socket
import subprocess

import httpx
import pytest
import uvicorn
from kvtier import __version__
from kvtier.api import build_app
from kvtier.config import Settings
from kvtier.core import Role
from kvtier.hierarchy import Hierarchy
from kvtier.metrics import Metrics
from kvtier.protocol import Asked
from kvtier.readings import Readings
from kvtier.tiers.host import HostOptions, HostTier
from support import MANIFEST

CAPACITY = 1 << 20
BLOCK_TOKENS = MANIFEST.block_tokens
SLOT_BYTES = MANIFEST.slot_bytes


class Control:
    """The parts behind the control plane, and a client in front of it."""

    def __init__(self):
        self.metrics = Metrics()
        self.host = HostTier(HostOptions(CAPACITY), self.metrics)
        self.hierarchy = Hierarchy(self.host, self.metrics, lambda: 0.0)
        self.ready = False
        self.app = build_app(self.hierarchy, self.metrics, Settings(), lambda: self.ready)
        self.client = httpx.AsyncClient()

    async def allocate(self):
        await self.host.allocate()
        self.ready = True

    def store(self, count, tenant=""):
        """Store a chain of blocks as an engine does, and look it up again."""
        session = self.hierarchy.open_session(Role.SCHEDULER, "engine-1", 0, 4711, MANIFEST)
        keys = [bytes([number]) * 32 for number in range(count)]
        self.hierarchy.commit(session, b"", keys, self.hierarchy.reserve(session, count, 0), tenant)
        self.hierarchy.lookup(session, 1, keys, 0, tenant)
        self.hierarchy.count(session, Asked(tenant, count, 1, count - 1))

    async def get(self, path):
        return await self.client.get(path)


@contextlib.asynccontextmanager
async def running(app):
    """Serve the app on a free port; gives its URL."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        web = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
        task = asyncio.create_task(web.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        web.should_exit = True
        await task


@pytest.fixture
async def control():
    parts = Control()
    async with running(parts.app) as url, parts.client:
        parts.client.base_url = url
        yield parts
    parts.host.close()


def check_problem(answer, status):
    """Every error is an RFC 9457 document that agrees with its response."""
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert set(problem) == {"type", "title", "status", "detail", "instance"}
    assert problem["status"] == status
    assert problem["instance"] == answer.request.url.path
    assert problem["detail"].endswith(".")
    return problem


async def test_health_does_not_wait_for_memory_and_readiness_does(control):
    assert (await control.get("/healthz")).json() == {"status": "ok"}
    problem = check_problem(await control.get("/readyz"), 503)
    assert "allocated" in problem["detail"]
    assert not (await control.get("/v1/stats")).json()["ready"]
    await control.allocate()
    assert (await control.get("/readyz")).json() == {"status": "ok"}
    assert (await control.get("/v1/stats")).json()["ready"]


async def test_an_empty_server_has_a_tier_and_nothing_else(control):
    tiers = (await control.get("/v1/tiers")).json()
    assert [tier["tier"] for tier in tiers] == ["host"]
    assert tiers[0]["capacity_bytes"] == CAPACITY
    assert tiers[0]["used_bytes"] == tiers[0]["blocks"] == 0
    assert (await control.get("/v1/sessions")).json() == []
    assert (await control.get("/v1/namespaces")).json() == []
    assert (await control.get("/v1/tenants")).json() == []


async def test_readings_show_what_an_engine_stored_and_hit(control):
    await control.allocate()
    control.store(5)
    stats = (await control.get("/v1/stats")).json()
    assert stats["version"] == __version__
    assert stats["lookups"] == 1
    assert stats["stores"]["committed"] == 5
    assert stats["traffic"] == [
        {"tier": "device", "tokens_asked": 5 * BLOCK_TOKENS, "tokens_hit": BLOCK_TOKENS},
        {"tier": "host", "tokens_asked": 4 * BLOCK_TOKENS, "tokens_hit": 4 * BLOCK_TOKENS},
    ]
    assert stats["total_hit_ratio"] == 1.0

    tier = (await control.get("/v1/tiers/host")).json()
    assert [tier] == (await control.get("/v1/tiers")).json()
    assert (tier["blocks"], tier["used_bytes"]) == (5, 5 * SLOT_BYTES)
    assert tier["host"]["slots"]["committed"] == 5

    (session,) = (await control.get("/v1/sessions")).json()
    assert (session["engine"], session["role"], session["pid"]) == ("engine-1", "scheduler", 4711)
    assert session["leased_blocks"] == 5

    (space,) = (await control.get("/v1/namespaces")).json()
    assert space["digest"] == session["namespace"] == MANIFEST.digest()
    assert space["manifest"]["model"] == MANIFEST.model
    assert (space["blocks"], space["sessions"]) == (5, 1)


async def test_a_tenants_totals_are_its_own(control):
    await control.allocate()
    control.store(3, tenant="acme")
    (tenant,) = (await control.get("/v1/tenants")).json()
    assert tenant == {
        "tenant": "acme",
        "lookups": 1,
        "traffic": [
            {"tier": "device", "tokens_asked": 3 * BLOCK_TOKENS, "tokens_hit": BLOCK_TOKENS},
            {"tier": "host", "tokens_asked": 2 * BLOCK_TOKENS, "tokens_hit": 2 * BLOCK_TOKENS},
            {"tier": "disk", "tokens_asked": 0, "tokens_hit": 0},
            {"tier": "redis", "tokens_asked": 0, "tokens_hit": 0},
        ],
        "stored_blocks": 3,
        "used_bytes": {"host": 3 * SLOT_BYTES, "disk": 0, "redis": 0},
    }


async def test_metrics_agree_with_the_readings_at_the_moment_of_the_scrape(control):
    await control.allocate()
    control.store(3)
    answer = await control.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if line[0] != "#")
    expected = {
        'kvtier_capacity_bytes{tier="host"}': CAPACITY,
        'kvtier_used_bytes{tier="host"}': 3 * SLOT_BYTES,
        'kvtier_blocks{tier="host"}': 3,
        'kvtier_slots{state="committed"}': 3,
        'kvtier_sessions{role="scheduler"}': 1,
        'kvtier_tokens_hit_total{tier="host"}': 2 * BLOCK_TOKENS,
    }
    assert {name: float(values[name]) for name in expected} == expected


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs Prometheus's promtool")
async def test_promtool_finds_nothing_to_say_about_the_metrics(control):
    text = (await control.get("/metrics")).text
    checked = await asyncio.to_thread(
        subprocess.run,
        ["promtool", "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize("tier", ["disk", "device", "HOST", "%2e%2e", "host%00", "x" * 64])
async def test_an_unknown_tier_is_a_problem_that_names_the_known_ones(control, tier):
    problem = check_problem(await control.get(f"/v1/tiers/{tier}"), 404)
    assert "host" in problem["detail"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/stats", "/v1/stats/x", "/v1/tiers/host/x"])
async def test_an_unknown_path_is_a_problem(control, path):
    assert path in check_problem(await control.get(path), 404)["detail"]


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_a_method_that_is_not_served_is_a_problem_that_names_those_served(control, method):
    answer = await control.client.request(method, "/v1/stats", content=b"{")
    assert method in check_problem(answer, 405)["detail"]
    assert answer.headers["allow"] == "GET"


async def test_a_parameter_of_the_wrong_type_is_a_problem_that_names_it(control):
    @control.app.get("/added")
    async def added(count: int) -> int:
        return count

    problem = check_problem(await control.get("/added?count=many"), 422)
    assert "query.count" in problem["detail"]


async def test_a_failure_inside_is_a_problem_without_its_details(control, monkeypatch):
    def fail():
        raise RuntimeError("secret")

    monkeypatch.setattr(Readings, "tiers", lambda _: fail())
    answer = await control.get("/v1/tiers")
    check_problem(answer, 500)
    assert "secret" not in answer.text
    assert (await control.get("/healthz")).status_code == 200


async def test_every_route_is_described_with_its_types(control):
    description = (await control.get("/openapi.json")).json()
    paths = description["paths"]
    assert {"/healthz", "/metrics", "/v1/stats", "/v1/blocks/drop", "/v1/pins"} <= set(paths)
    for path, methods in paths.items():
        for method, route in methods.items():
            where = f"{method} {path}"
            assert route["description"], where
            problems = {code for code in route["responses"] if code >= "400"}
            assert problems >= {"400", "413", "421"}, where
            [good] = [code for code in route["responses"] if code.startswith("2")]
            if path != "/metrics" and good != "204":
                assert route["responses"][good]["content"]["application/json"]["schema"], where
