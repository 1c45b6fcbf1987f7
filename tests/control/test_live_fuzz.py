"""Whatever is sent to change settings: an answer of 4xx changed nothing, and there is no 5xx."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtier.config import load_settings
from kvtier.live import LIVE, Kept, plain
from kvtier.policies import POLICIES
from kvtier.serve import Server

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=20),
    st.sampled_from(
        ["lru", "1GiB", "64KiB", "through", "always", "0", "-1", "1e9", "auto", "info"]
    ),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.one_of(
    st.sampled_from(LIVE), st.text(max_size=20), st.sampled_from(["http.port", "host"])
)
BODIES = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {"changes": st.dictionaries(KEYS, st.one_of(SCALARS, JSON), max_size=4)},
        optional={"guard": JSON, "other": JSON},
    ),
    st.fixed_dictionaries(
        {"settings": st.dictionaries(st.text(max_size=12), SCALARS, max_size=3)},
        optional={"guard": JSON},
    ),
)
VERSIONS = st.one_of(st.none(), st.sampled_from(["*", '"1"', "1", 'W/"1"', '"999"', "", "x"]))
PATHS = st.sampled_from(["/v1/settings", *(f"/v1/tiers/{name}" for name in ("host", "disk", "x"))])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    given_settings = {
        "state": str(folder / "state"),
        "socket": str(folder / "k.sock"),
        "host.capacity": "1MiB",
        "disk.path": str(folder / "blocks"),
    }
    made = Server(load_settings(None, given_settings), Kept(1, 1, {}), load_settings)
    yield made, made.app()
    for tier in made.lowers:
        tier.close()
    made.host.close()


async def send(site, path, content, version):
    headers = {"Content-Type": "application/json"}
    if version is not None:
        headers["If-Match"] = version
    server, app = site
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.patch(path, content=content, headers=headers)
    await server.live.close()
    return answer


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(path=PATHS, body=BODIES, version=VERSIONS)
@pytest.mark.slow
def test_what_is_refused_changes_nothing(site, path, body, version):
    server = site[0]
    before = (plain(server.live.settings), server.live.version, dict(server.live.kept))
    answer = asyncio.run(send(site, path, json.dumps(body), version))
    assert answer.status_code < 500, answer.text
    after = (plain(server.live.settings), server.live.version, dict(server.live.kept))
    if answer.status_code >= 400:
        assert after == before
        assert answer.headers["content-type"] == "application/problem+json"
    else:
        assert server.live.settings.host.policy in POLICIES
        assert after[1] >= before[1]


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(path=PATHS, content=st.binary(max_size=200))
def test_rubbish_is_a_problem_of_the_sender(site, path, content):
    before = site[0].live.version
    answer = asyncio.run(send(site, path, content, "*"))
    assert 400 <= answer.status_code < 500
    assert site[0].live.version == before
