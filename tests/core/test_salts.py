"""Salts: whose they are, by digests that say nothing without the file's key."""

from __future__ import annotations

import json

import pytest
from kvtier.errors import SettingsError
from kvtier.protocol import SALT_MARK, salted
from kvtier.salts import Salts, add_salt, load_salts


def test_a_file_says_whose_a_salt_is_and_has_only_digests(tmp_path):
    file = tmp_path / "salts.json"
    digest = add_salt(file, "pepper", "acme")
    add_salt(file, "paprika", "globex")
    add_salt(file, "chili", "acme")
    salts = load_salts(file)
    assert salts.tenant(salted(salts.key, "pepper")) == "acme"
    assert salts.tenant(salted(salts.key, "paprika")) == "globex"
    assert salts.tenant(salted(salts.key, "chili")) == "acme"
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    assert digest in text
    assert "pepper" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["salts.json"]


def test_an_unknown_salt_is_nobodys_and_a_name_stays_a_name(tmp_path):
    file = tmp_path / "salts.json"
    digest = add_salt(file, "pepper", "acme")
    salts = load_salts(file)
    assert salts.tenant(salted(salts.key, "salt")) == ""
    assert salts.tenant(SALT_MARK) == ""
    assert salts.tenant(digest) == digest, "a name that looks like a digest is a name"
    assert salts.tenant("globex") == "globex"


def test_the_same_salt_has_another_digest_with_another_key(tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert add_salt(one, "pepper", "acme") != add_salt(two, "pepper", "acme")
    assert add_salt(one, "pepper", "globex") == add_salt(one, "pepper", "globex")
    assert len(load_salts(one).tenants) == 1, "the last one counts"


def test_without_a_file_there_is_no_key_and_no_tenant():
    assert load_salts(None) == Salts()
    assert load_salts(None).key == b""


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"key": "00"}, {"key": "x" * 64}, {"salts": {"pepper": "acme"}},
        {"salts": {"0" * 32: "a" * 129}}, {"salts": {"0" * 32: "\n"}}, {"salts": []}, {"more": 1},
    ],
)  # fmt: skip
def test_what_is_no_file_of_salts_is_refused_and_not_shown(tmp_path, change):
    file = tmp_path / "salts.json"
    add_salt(file, "pepper", "acme")
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | change))
    with pytest.raises(SettingsError) as refused:
        load_salts(file)
    assert "is not a file of salts" in str(refused.value)
    assert content["key"] not in str(refused.value)
    assert "acme" not in str(refused.value)


def test_a_file_that_can_not_be_read_is_named(tmp_path):
    with pytest.raises(SettingsError, match="can't be read: No such file"):
        load_salts(tmp_path / "none.json")
    with pytest.raises(SettingsError, match="can't be written: No such file"):
        add_salt(tmp_path / "no" / "salts.json", "pepper", "acme")
    with pytest.raises(SettingsError, match="no salt on standard input"):
        add_salt(tmp_path / "salts.json", "", "acme")


def test_neither_key_nor_digests_are_shown_by_accident(tmp_path):
    file = tmp_path / "salts.json"
    digest = add_salt(file, "pepper", "acme")
    salts = load_salts(file)
    assert digest not in repr(salts)
    assert repr(salts.key) not in repr(salts)
