"""Rollout shards: round trips, commits, seals, and refusals that name the file."""

import io
import math
import re
import threading
import uuid
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_factories import (
    CHECKPOINT,
    FINGERPRINT,
    commit_round,
    configuration,
    group,
    group_of,
    policy,
    rollout,
)

from marin_rl.errors import CorruptObject, InputError, NewerSchema, ObjectMissing
from marin_rl.storage.runs import Run, shard_key
from marin_rl.storage.stores.filesystem import MemoryStore
from marin_rl.storage.tables.parquet import PARTS_MAX, fetches_at_once
from marin_rl.storage.tables.rollouts import (
    commit_shard,
    decode_shard,
    encode_shard,
    groups_of,
    iter_row_groups,
    iter_shards,
    rollouts_manifest,
    seal_round,
    shard_ref,
)
from marin_rl.types import RewardComponent, RolloutGroup
from schemas.tables import ROLLOUTS


def _encoded(groups: Sequence[RolloutGroup], attempt: str = "a1") -> bytes:
    return encode_shard(
        groups,
        run_id="run",
        round=3,
        shard=2,
        attempt=attempt,
        replica="host:1",
        fingerprint=FINGERPRINT,
        policy=policy(),
    )


def _run(root: tuple[str, dict[str, Any]] | Path, **sections: Any) -> Run:
    url, options = root if isinstance(root, tuple) else (str(root), {})
    return Run.create_or_open(configuration(url, storage_options=options, **sections))


def _same(a: Any, b: Any) -> bool:
    """Equality of nouns, arrays included; NaN equals NaN."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if is_dataclass(a):
        return type(a) is type(b) and all(
            _same(getattr(a, field.name), getattr(b, field.name)) for field in fields(a)
        )
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return a == b


GROUPS = st.lists(
    st.lists(
        st.fixed_dictionaries(
            {
                "reward": st.none() | st.floats(allow_infinity=False),
                "status": st.sampled_from(["complete", "truncated", "aborted", "error"]),
                "prompt": st.lists(st.integers(0, 2**31 - 1), max_size=3),
                "completion": st.lists(st.integers(0, 2**31 - 1), max_size=4),
                "version": st.integers(0, 2**31 - 1),
            }
        ),
        min_size=1,
        max_size=4,
    ),
    min_size=1,
    max_size=4,
)


@given(GROUPS)
def test_nothing_is_lost_on_the_way_to_disk_and_back(drawn: list[list[dict[str, Any]]]) -> None:
    groups = [
        group_of(f"g{g}", [rollout(f"g{g}/{i}", index=i, **x) for i, x in enumerate(members)])
        for g, members in enumerate(drawn)
    ]
    found = groups_of(decode_shard(_encoded(groups)))
    assert _same(tuple(found), tuple(groups))


def test_versions_per_token_survive() -> None:
    groups = [
        group_of(
            "g",
            [
                rollout("g/0", prompt=[1], completion=[2, 3], policy_versions=[4, 4, 5]),
                rollout("g/1", index=1),
            ],
        )
    ]
    table = decode_shard(_encoded(groups))
    assert table["policy_versions"].to_pylist() == [[4, 4, 5], None]
    assert _same(tuple(groups_of(table)), tuple(groups))


def test_a_turn_gets_the_logprobs_of_its_own_tokens() -> None:
    (found,) = groups_of(decode_shard(_encoded([group("g", [1.0])])))
    user, assistant = found.rollouts[0].turns
    assert user.logprobs is None
    assert assistant.logprobs is not None
    assert assistant.logprobs.tolist() == [-0.5, -1.0]


def test_columns_and_encodings_are_those_of_the_schema() -> None:
    data = _encoded([group("g", [1.0, 0.0])])
    file = pq.ParquetFile(io.BytesIO(data))
    assert file.schema_arrow.equals(ROLLOUTS)
    found = {}
    row_group = file.metadata.row_group(0)
    for i in range(row_group.num_columns):
        column = row_group.column(i)
        found[column.path_in_schema.partition(".")[0]] = column
    assert "BYTE_STREAM_SPLIT" in found["logprobs"].encodings
    assert not found["token_ids"].has_dictionary_page
    assert found["reward"].compression == "ZSTD"
    assert found["rollout_id"].has_offset_index
    assert decode_shard(data, ["reward", "group_id"]).column_names == ["reward", "group_id"]


def test_a_group_is_never_split_between_row_groups() -> None:
    groups = [group(f"g{g}", [0.0] * 300, completion=[1]) for g in range(7)]
    file = pq.ParquetFile(io.BytesIO(_encoded(groups)))
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert sizes == [900, 900, 300]
    whole = _encoded([group("one", [0.0] * 1500, completion=[1])])
    assert pq.ParquetFile(io.BytesIO(whole)).num_row_groups == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_mask": np.ones(3, np.int32)}, "5 token_ids, but 3 loss_mask"),
        ({"n_prompt_tokens": 4}, "is 6, but there are 5 token_ids"),
        ({"logprobs": np.full(5, np.nan, np.float32)}, "logprob is not a finite number"),
    ],
)
def test_rollouts_that_contradict_themselves_are_not_written(change, message):
    broken = rollout("g/0")
    for name, value in change.items():
        object.__setattr__(broken, name, value)  # the constructor's shape check is for tests only
    with pytest.raises(ValueError, match=f"rollout g/0: .*{message}"):
        _encoded([group_of("g", [broken])])


def test_a_rollout_is_written_once() -> None:
    with pytest.raises(ValueError, match="rollout g/0 is in the shard more than once"):
        _encoded([group_of("g", [rollout("g/0"), rollout("g/0", index=1)])])


def test_metadata_must_be_json() -> None:
    example = replace(group("g", [1.0]).example, metadata={"when": object()})
    with pytest.raises(InputError, match=r"example echo-g of environment echo: .*not JSON"):
        _encoded([replace(group("g", [1.0]), example=example)])


@pytest.mark.parametrize("change", [{"answer": "\ud800"}, {"metadata": {"raw": "a\udfff"}}])
def test_a_text_that_is_not_unicode_is_named(change: dict[str, Any]) -> None:
    example = replace(group("g", [1.0]).example, **change)
    (column,) = change
    with pytest.raises(InputError, match=rf"column {column} is not Unicode.*at character \d"):
        _encoded([replace(group("g", [1.0]), example=example)])


@pytest.mark.slow
@given(st.integers(0, 10**9), st.integers(0, 7))
def test_a_flipped_bit_is_never_read_as_if_nothing_had_happened(place: int, bit: int) -> None:
    data = bytearray(_encoded([group("g", [1.0, 0.0], completion=range(40))]))
    clean = decode_shard(bytes(data))
    data[place % len(data)] ^= 1 << bit
    try:
        table = decode_shard(bytes(data))
    except (CorruptObject, NewerSchema):
        return
    # A flip in the footer's statistics or names of unread things is no page's: then the values
    # must still be right. The manifest's SHA-256 catches those too.
    assert table.equals(clean)


def test_statistics_of_another_type_than_the_column_end_no_process() -> None:
    """Pyarrow's metadata objects end the process over them, in code that catches no exception."""
    data = _encoded([group("g", [1.0])])
    clean, refused = decode_shard(data), 0
    of_texts = [found.start() + 1 for found in re.finditer(b"\x15\x0c%", data)]
    assert len(of_texts) > 20
    for place in of_texts:
        flipped = bytearray(data)
        flipped[place] = 8  # the schema says FLOAT where BYTE_ARRAY is
        try:
            assert decode_shard(bytes(flipped)).equals(clean)
        except CorruptObject:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize("keep", [0, 3, 100, -100, -1])
def test_truncated_shards_are_named(keep: int) -> None:
    data = _encoded([group("g", [1.0])])[:keep]
    with pytest.raises(CorruptObject, match=r"gs://b/shard-0002\.parquet is not a readable"):
        decode_shard(data, source="gs://b/shard-0002.parquet")


def test_newer_versions_are_refused_by_name() -> None:
    table = pq.read_table(io.BytesIO(_encoded([group("g", [1.0])])))
    metadata = {**table.schema.metadata, b"marin_rl.schema_version": b"7"}
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), sink)
    with pytest.raises(NewerSchema, match=r"^x\.parquet: .*version 7 is newer than 6.*upgrade"):
        decode_shard(sink.getvalue(), source="x.parquet")


def test_foreign_parquet_files_are_refused() -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"a": [1]}), sink)
    with pytest.raises(CorruptObject, match="expected format 'marin-rl/rollouts', found None"):
        decode_shard(sink.getvalue())


def test_missing_columns_are_named() -> None:
    table = pq.read_table(io.BytesIO(_encoded([group("g", [1.0])])))
    sink = io.BytesIO()
    pq.write_table(table.drop_columns(["reward"]), sink)
    with pytest.raises(CorruptObject, match="columns reward are missing"):
        decode_shard(sink.getvalue())


def test_commit_seal_and_read_on_every_backend(root: tuple[str, dict[str, Any]]) -> None:
    run = _run(root, shards=2)
    groups = [[group("a", [0.0, 1.0])], [group("b", [2.0, None])]]
    assert shard_ref(run, 0, 0, FINGERPRINT) is None
    refs = [commit_shard(run, 0, s, groups[s], FINGERPRINT, policy()) for s in (0, 1)]
    assert [ref.slot for ref in refs] == [shard_key(0, 0), shard_key(0, 1)]
    again = shard_ref(run, 0, 1, FINGERPRINT)
    assert again == refs[1]
    assert again is not None
    assert again.reused
    sealed = seal_round(run, 0, refs[::-1], [CHECKPOINT])
    assert seal_round(run, 0, refs, [CHECKPOINT]) == sealed
    manifest = rollouts_manifest(run, 0, sealed)
    assert [part.name for part in manifest.parts] == ["shard-0000.parquet", "shard-0001.parquet"]
    assert [part.sha256 for part in manifest.parts] == [ref.sha256 for ref in refs]
    assert manifest.parts[0].maxima == {
        "reward": 1.0,
        "policy_version_min": 0.0,
        "policy_version_max": 0.0,
    }
    assert manifest.parents[0].slot == CHECKPOINT.slot
    expected = {"rows": 4, "groups": 2, "tokens": 20, "completion_tokens": 8, "errors": 0}
    expected |= {"reward_mean": 1.0, "reward_min": 0.0, "reward_max": 2.0}
    assert manifest.totals == {**expected, "policy_version_min": 0, "policy_version_max": 0}
    found = [group for table in iter_shards(run, 0) for group in groups_of(table)]
    assert _same(tuple(found), (*groups[0], *groups[1]))
    rewards = [table["reward"].to_pylist() for table in iter_row_groups(run, manifest, ["reward"])]
    assert rewards == [[0.0, 1.0], [2.0, None]]


def test_a_round_is_sealed_with_all_its_shards_or_not_at_all(tmp_path: Path) -> None:
    run = _run(tmp_path, shards=2)
    first = commit_shard(run, 0, 0, [group("g", [0.0, 1.0])], FINGERPRINT, policy())
    for shards in ([first], [first, first]):
        with pytest.raises(ValueError, match=r"expected the shards .*shard-0001"):
            seal_round(run, 0, shards, [CHECKPOINT])
    with pytest.raises(ObjectMissing, match="not sealed"):
        next(iter_shards(run, 0))


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_a_shard_damaged_after_the_seal_is_named(tmp_path: Path, damage: str) -> None:
    run = _run(tmp_path)
    commit_round(run, 0, [[group("g", [0.0, 1.0])]])
    path = run.store.local_path(shard_key(0, 0))
    assert path is not None
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "flip":
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    else:
        path.write_bytes(data[: {"cut": 1000, "empty": 0}[damage]])
    with pytest.raises((CorruptObject, ObjectMissing), match=r"shard-0000\.parquet"):
        list(iter_shards(run, 0))


def test_texts_behind_reward_components_are_kept_by_rollout():
    one, other = (
        replace(
            rollout(f"g/{index}", index=index),
            reward_components=(RewardComponent(name="judge", value=1.0, detail=detail),),
        )
        for index, detail in enumerate(("SCORE: 10", None))
    )
    written = group_of("g", [one, other])
    table = decode_shard(_encoded([written]))
    (read,) = groups_of(table)
    details = [each.reward_components[0].detail for each in read.rollouts]
    assert details == ["SCORE: 10", None]
    assert dict(read.example.metadata) == dict(written.example.metadata)
    assert '"reward_details": {"judge": "SCORE: 10"}' in table["metadata"][0].as_py()
    assert "reward_details" not in table["metadata"][1].as_py()


def test_shards_in_a_bucket_are_read_side_by_side_and_stay_in_order(monkeypatch):
    """A barrier in the store: one read after another would wait at it for ever."""
    config = configuration(f"memory://{uuid.uuid4().hex}", shards=PARTS_MAX, groups=PARTS_MAX)
    run = Run.create_or_open(config)
    names = [f"round-00000/group-{shard:05d}" for shard in range(PARTS_MAX)]
    refs = [
        commit_shard(run, 0, shard, [group(name, [1.0])], FINGERPRINT, policy())
        for shard, name in enumerate(names)
    ]
    read, all_there = MemoryStore.read, threading.Barrier(PARTS_MAX, timeout=30)

    def waiting(self: MemoryStore, key: str) -> bytes:
        if "shard-" in key:
            all_there.wait()
        return read(self, key)

    monkeypatch.setattr(MemoryStore, "read", waiting)
    seal_round(run, 0, refs, [CHECKPOINT])
    rows = pa.concat_tables(iter_shards(run, 0, ["group_id"]))
    assert rows["group_id"].to_pylist() == names


def test_small_parts_are_fetched_more_at_once_within_the_same_memory() -> None:
    at_once = [fetches_at_once(size) for size in (0, 2**20, 8 * 2**20, 32 * 2**20, 2**30)]
    assert at_once == [64, 64, 32, 8, 8]
