"""Manifests and ladders: canonical bytes, strict fields, and upgrades from version to version."""

import hashlib
import json

import pyarrow as pa
import pytest

from schemas import Malformed, NewerVersion
from schemas.manifests import (
    Manifest,
    Parent,
    Part,
    canonical_json,
    open_sealed_json,
    sealed_json,
    sha256_of,
)
from schemas.migrations import BATCHES, DISPOSITIONS, METRICS, ROLLOUTS, SCORES, Ladder
from schemas.tables import batches_schema

MANIFEST = Manifest(
    slot="batches/round-00003",
    attempt="20260101T000000-0123456789abcdef",
    fingerprint="f" * 64,
    created_at="2026-01-01T00:00:00.000000+00:00",
    code={"package": "0.1.0"},
    libraries={"numpy": "2.4.6"},
    parents=(Parent("rollouts/round-00003", "a" * 64),),
    parts=(
        Part(
            name="x/batches.parquet",
            bytes=12,
            sha256="b" * 64,
            rows=3,
            minima={"reward": -1.5},
            maxima={"reward": 2},
        ),
        Part(name="x/config.json", bytes=0, sha256=sha256_of(b"")),
    ),
    totals={"rows": 3, "reward_mean": 0.1},
    extra={"text": "naïve — 漢字", "nested": [1, {"a": None}]},
)

# Written out by hand once: these bytes may never change for version 1.
STORED = (
    '{"attempt":"20260101T000000-0123456789abcdef","code":{"package":"0.1.0"},'
    '"created_at":"2026-01-01T00:00:00.000000+00:00","digest":"%s",'
    '"extra":{"nested":[1,{"a":null}],"text":"naïve — 漢字"},"fingerprint":"' + "f" * 64 + '",'
    '"format":"marin-rl/manifest","libraries":{"numpy":"2.4.6"},"parents":[{"sha256":"'
    + "a"
    * 64
    + '","slot":"rollouts/round-00003"}],"parts":[{"bytes":12,"maxima":{"reward":2},'
    '"minima":{"reward":-1.5},"name":"x/batches.parquet","rows":3,"sha256":"' + "b" * 64 + '"},'
    '{"bytes":0,"maxima":{},"minima":{},"name":"x/config.json","rows":null,'
    '"sha256":"e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}],'
    '"slot":"batches/round-00003","totals":{"reward_mean":0.1,"rows":3},"version":1}'
)


def test_the_bytes_of_version_1() -> None:
    without = (STORED % "").replace('"digest":"",', "")
    expected = STORED % hashlib.sha256(without.encode()).hexdigest()
    assert MANIFEST.to_json().decode() == expected
    assert MANIFEST.sha256 == hashlib.sha256(expected.encode()).hexdigest()


def test_a_manifest_comes_back_as_it_went() -> None:
    assert Manifest.from_json(MANIFEST.to_json()) == MANIFEST


def test_numbers_that_are_not_numbers_are_refused() -> None:
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="Out of range float"):
            Manifest(
                slot="s", attempt="a", fingerprint="f", created_at="t", totals={"reward": bad}
            ).to_json()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a JSON object of format marin-rl/manifest"),
        (b"\xff\xfe", "expected a JSON object"),
        (b"[]", "expected format 'marin-rl/manifest', found 'list'"),
        (b'{"format":"other"}', "found 'other'"),
        (b'{"format":"marin-rl/manifest","version":"1"}', "expected a version from 1 to 1"),
        (b'{"format":"marin-rl/manifest","version":1}', "does not match its own digest"),
        (sealed_json({"format": "marin-rl/manifest", "version": 1}), "expected the fields"),
        (MANIFEST.to_json()[:-30], "expected a JSON object"),
        (MANIFEST.to_json().replace(b'"rows":3', b'"rows":4'), "does not match its own digest"),
        (json.dumps(json.loads(MANIFEST.to_json())).encode(), "not canonical JSON"),
    ],
)
def test_bytes_that_are_no_manifest_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(Malformed, match=message):
        Manifest.from_json(data)


def test_a_part_with_other_fields_is_refused() -> None:
    record = json.loads(MANIFEST.to_json())
    del record["digest"], record["parts"][0]["rows"]
    record["parts"][0]["lines"] = 3
    with pytest.raises(Malformed, match=r"field parts\.0\.(rows|lines)"):
        Manifest.from_json(sealed_json(record))


def test_a_newer_version_is_refused_with_any_fields() -> None:
    data = canonical_json({"format": "marin-rl/manifest", "version": 7, "strange": [1]})
    with pytest.raises(NewerVersion, match="version 7 is newer than 1, the newest this software"):
        Manifest.from_json(data)


def test_sealed_records_open_to_what_was_sealed() -> None:
    record = {"format": "f", "version": 2, "b": 1, "a": [True, None, "é"]}
    assert open_sealed_json(sealed_json(record), format="f", version=3) == record


def test_canonical_json_is_one_text_per_value() -> None:
    assert (
        canonical_json({"b": 1, "a": {"d": 1.0, "c": "é"}})
        == '{"a":{"c":"é","d":1.0},"b":1}'.encode()
    )


def _add(name: str):
    return lambda table: table.append_column(name, pa.nulls(table.num_rows, pa.int32()))


LADDER = Ladder("test/format", 3, {1: _add("second"), 2: _add("third")})


@pytest.mark.parametrize(("version", "added"), [(1, ["second", "third"]), (2, ["third"]), (3, [])])
def test_every_rung_from_the_version_up_is_climbed_once(version: int, added: list[str]) -> None:
    table = pa.table({"first": [1, 2]})
    found = LADDER.upgrade(table, version)
    assert found.column_names == ["first", *added]
    assert table.column_names == ["first"]


def test_newer_versions_and_those_below_one_are_refused() -> None:
    with pytest.raises(NewerVersion, match="test/format version 4 is newer than 3"):
        LADDER.upgrade(pa.table({}), 4)
    with pytest.raises(Malformed, match="from 1, found 0"):
        LADDER.check(0)


@pytest.mark.parametrize("ladder", [ROLLOUTS, BATCHES, DISPOSITIONS, METRICS, SCORES])
def test_every_ladder_has_a_rung_below_each_newer_version(ladder: Ladder) -> None:
    assert sorted(ladder.rungs) == list(range(1, ladder.newest))


def test_batches_have_one_length() -> None:
    schema = batches_schema(96)
    assert schema.field("token_ids").type.list_size == 96
    assert schema.field("advantages").type.value_type == pa.float32()
    with pytest.raises(ValueError, match="at least 1 token, found 0"):
        batches_schema(0)
