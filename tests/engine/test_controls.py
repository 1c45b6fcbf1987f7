"""What a request may ask of the cache is read strictly, and refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtier.engine.controls import (
    KEYS,
    PARAM,
    TENANT_CHARACTERS,
    Controls,
    ControlsError,
    read_controls,
)
from kvtier.errors import EngineError

OPERATIONS = Path(__file__).resolve().parents[2] / "docs/operations.md"
REFERENCE = OPERATIONS.read_text("utf-8").split("<!-- controls -->")[1].split("<!-- /")[0]
printable = st.text(st.characters().filter(str.isprintable), min_size=0, max_size=TENANT_CHARACTERS)
sound = {
    "store": st.booleans(),
    "load": st.booleans(),
    "tenant": printable,
    "limit_tokens": st.integers(min_value=0),
}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy: how long an example takes says nothing."""


def kvtier(**asked):
    return {PARAM: asked}


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": True, "store": False}])
def test_a_request_that_says_nothing_to_kvtier_gets_the_defaults(params):
    assert read_controls(params) == Controls(store=True, load=True, tenant="", limit_tokens=None)


@untimed
@given(asked=st.fixed_dictionaries({}, optional=sound), others=st.dictionaries(
    st.text().filter(lambda key: key != PARAM), json_values, max_size=3
))  # fmt: skip
def test_what_is_sound_is_taken_as_it_is_and_the_rest_has_its_default(asked, others):
    controls = read_controls(others | {PARAM: asked})
    for key in KEYS:
        found = getattr(controls, key)
        assert found == asked.get(key, getattr(Controls(), key))
        assert type(found) is type(asked.get(key, found))


def is_sound(key, value):
    if key in ("store", "load"):
        return value is True or value is False
    if key == "tenant":
        return isinstance(value, str) and len(value) <= TENANT_CHARACTERS and value.isprintable()
    return key == "limit_tokens" and type(value) is int and value >= 0


@untimed
@given(asked=st.dictionaries(st.sampled_from(KEYS) | st.text(), json_values, max_size=4))
def test_anything_else_is_refused_in_one_short_sentence(asked):
    if all(is_sound(key, value) for key, value in asked.items()):
        read_controls({PARAM: asked})
        return
    with pytest.raises(ControlsError) as refused:
        read_controls({PARAM: asked})
    said = str(refused.value)
    assert said.startswith("kv_transfer_params: ")
    assert PARAM in said
    assert "\n" not in said
    assert len(said) < 200


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"stroe": False}, "unknown key 'stroe': did you mean store?"),
        ({"limit": 3}, "unknown key 'limit': did you mean limit_tokens?"),
        ({"priority": 3}, f"unknown key 'priority': the keys are {', '.join(KEYS)}"),
        ({"store": 1}, "kvtier.store is 1, and must be true or false"),
        ({"store": {"a": {"b": [1]}}}, "kvtier.store is an object, and must be true or false"),
        ({"store": [True]}, "kvtier.store is a list, and must be true or false"),
        ({"load": "no"}, "kvtier.load is 'no', and must be true or false"),
        ({"limit_tokens": True}, "kvtier.limit_tokens is True, and must be a whole number"),
        ({"limit_tokens": -1}, "kvtier.limit_tokens is -1, and must be a whole number"),
        ({"limit_tokens": 2.0}, "kvtier.limit_tokens is 2.0, and must be a whole number"),
        ({"tenant": None}, "kvtier.tenant is None, and must be text"),
        ({"tenant": "a" * 129}, "kvtier.tenant has 129 characters, and may have at most 128"),
        ({"tenant": "a\nb"}, "kvtier.tenant has a character that can't be printed"),
        ({"tenant": "\ud800"}, "kvtier.tenant has a character that can't be printed"),
    ],
)  # fmt: skip
def test_the_sentence_names_the_key_and_the_way_out(asked, said):
    with pytest.raises(ControlsError) as refused:
        read_controls({PARAM: asked})
    assert said in str(refused.value)


@pytest.mark.parametrize("asked", [None, True, "store", ["store"], 3])
def test_kvtier_must_be_an_object(asked):
    with pytest.raises(ControlsError, match=r'"kvtier" is .*, and must be an object'):
        read_controls({PARAM: asked})


def test_a_refusal_is_an_engines_error():
    assert issubclass(ControlsError, EngineError)


def test_the_reference_has_exactly_the_keys_with_their_defaults():
    rows = [line for line in REFERENCE.splitlines() if line.startswith("| `")]
    cells = [[cell.strip(" `") for cell in row.strip("|").split("|")[:2]] for row in rows]
    shown = {True: "true", "": "none", None: "none"}
    assert cells == [[key, shown[getattr(Controls(), key)]] for key in KEYS]
