"""The audit: silent on good runs, and names what does not add up on bad ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support.run_factories import (
    audit_round,
    checkpoint,
    commit_round,
    configuration,
    group,
    whole_run,
)
from typer.testing import CliRunner

from marin_rl.batching.build import build_round
from marin_rl.cli import app
from marin_rl.storage.commits import commit_slot, read_manifest
from marin_rl.storage.layout import BATCHES_PREFIX
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot
from marin_rl.storage.tables.batches import read_dispositions, write_dispositions
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.storage.upkeep.audit import NAMES_MAX, RoundAudit, audit_run

Change = Callable[[pa.Table], pa.Table]


def _run(tmp_path: Path) -> Run:
    run = Run.create_or_open(configuration(str(tmp_path), batching={"staleness_rounds_max": 9}))
    groups = [group("g", [0.0, 1.0, 1.0]), group("h", [1.0, 1.0]), group("i", [None, 1.0, 0.0])]
    build_round(run, 0, commit_round(run, 0, [groups]))
    return run


def _tampered(tmp_path: Path, change: Change) -> RoundAudit:
    """The audit of a round whose dispositions were changed behind its back, digests and all."""
    return _retold(_run(tmp_path), change)


def _retold(run: Run, change: Change) -> RoundAudit:
    slot = batches_slot(0)
    found = read_manifest(run.store, slot)
    assert found is not None
    manifest = found[0]
    part = write_dispositions(run.store, slot, "evil", change(read_dispositions(run, 0)))
    run.store.delete(f"{slot}/manifest.json")
    commit_slot(
        run.store,
        slot,
        attempt="evil",
        fingerprint=manifest.fingerprint,
        parents=manifest.parents,
        parts=[*(p for p in manifest.parts if p.name.startswith(BATCHES_PREFIX)), part],
        totals=manifest.totals,
        extra=manifest.extra,
    )
    return audit_round(run, 0)


def _set(table: pa.Table, name: str, column: str, value: object) -> pa.Table:
    here = pc.equal(table["rollout_id"], name)
    field = table.schema.field(column)
    changed = pc.if_else(here, pa.scalar(value, field.type), table[column])
    return table.set_column(table.schema.get_field_index(column), field, changed)


def test_a_good_round_balances(tmp_path: Path) -> None:
    report = audit_round(_run(tmp_path), 0)
    assert report == RoundAudit(round=0, generated=8, consumed=5, filtered=2, failed=1)
    assert report.balanced
    assert report.problems == ()


@pytest.mark.parametrize(
    ("change", "offences"),
    [
        (
            lambda t: t.slice(1),
            {"without a disposition": ("g/0",), "in the batches and in no disposition": ("g/0",)},
        ),
        (lambda t: pa.concat_tables([t, t.slice(3, 1)]), {"disposed of more than once": ("h/0",)}),
        (
            lambda t: _set(t, "h/1", "rollout_id", "ghost"),
            {"without a disposition": ("h/1",), "disposed of but never generated": ("ghost",)},
        ),
        (
            lambda t: _set(t, "g/1", "row", 3),
            {
                "not where its disposition says": ("g/1",),
                "in the batches and in no disposition": ("g/1",),
            },
        ),
        (
            lambda t: _set(t, "h/0", "step", 0),
            {"consumed without a place, or the reverse": ("h/0",)},
        ),
        (
            lambda t: _set(t, "h/0", "reason", None),
            {"dropped without a reason, or the reverse": ("h/0",)},
        ),
        (lambda t: _set(t, "h/0", "disposition", "lost"), {"of unknown disposition": ("h/0",)}),
    ],
)
def test_totals_that_do_not_add_up_are_named(tmp_path, change, offences):
    report = _tampered(tmp_path, change)
    found = dict(report.offences)
    found.pop("manifest totals", None)
    assert found == offences


def test_totals_are_compared(tmp_path: Path) -> None:
    report = _tampered(tmp_path, lambda t: _set(t, "i/0", "disposition", "stale"))
    assert report.stale == 1
    assert not report.balanced
    assert report.problems == (
        "manifest totals: batches/round-00000 rollouts/stale: says 0.0, counted 1, "
        "batches/round-00000 rollouts/failed: says 1.0, counted 0",
    )


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_round_that_lost_rollouts_and_batches_is_named(tmp_path: Path, rounds: int) -> None:
    """Later rounds tell of it, or its metrics where it is the last and lost its checkpoint too."""
    run = whole_run(str(tmp_path), rounds)
    last = ["checkpoints/round-00002"] if rounds == 2 else []
    for slot in ["rollouts/round-00001", "batches/round-00001", *last]:
        shutil.rmtree(tmp_path / "run" / slot)
    audits = list(audit_run(run))
    assert [audit.round for audit in audits] == list(range(rounds))
    assert [audit.round for audit in audits if not audit.balanced] == [1]
    assert "batches/round-00001 is not committed" in audits[1].problems[0]


def test_a_rollout_that_two_rounds_consume_is_named(tmp_path: Path) -> None:
    run = _run(tmp_path)
    build_round(run, 1, commit_round(run, 1, [[group("g", [0.0, 1.0]), group("new", [0.0, 1.0])]]))
    first, second = audit_run(run)
    assert first.balanced
    assert second.offences == {"consumed in an earlier round": ("g/0 (round 0)", "g/1 (round 0)")}


def test_a_round_that_lost_its_batches_is_named(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.store.delete("batches/round-00000/manifest.json")
    assert list(audit_run(run)) == []  # it may be about to be processed
    run.store.put_part("checkpoints/round-00001/manifest.json", b"{}")
    (report,) = audit_run(run)
    assert report.round == 0
    assert "nothing says where its rollouts went" in report.problems[0]
    run.store.put_part("batches/round-00000/manifest.json", b"{")
    (report,) = audit_run(run)
    assert not report.balanced


def test_shards_that_no_manifest_names_are_reported(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.store.put_part("rollouts/round-00000/shard-0007.parquet", b"what is this")
    report = audit_round(run, 0)
    assert report.offences == {"shards outside the manifest": ("shard-0007.parquet",)}


def test_long_lists_are_cut_for_people_alone(tmp_path: Path) -> None:
    run = Run.create_or_open(configuration(str(tmp_path)))
    build_round(run, 0, commit_round(run, 0, [[group("g", [0.0, 1.0] * 20, completion=[1])]]))
    assert audit_round(run, 0).balanced
    build_round(
        run, 1, commit_round(run, 1, [[group("g", [0.0, 1.0] * 20, completion=[1], version=1)]])
    )
    _, second = audit_run(run)
    (names,) = second.offences.values()
    assert len(names) == NAMES_MAX + 20
    (told,) = second.problems
    assert told.endswith(f"{names[NAMES_MAX - 1]}, and 20 more")
    assert names[NAMES_MAX] not in told
    shown = CliRunner().invoke(app, ["audit", "run", "--json", "--root", str(tmp_path)])
    *_, line = shown.stdout.splitlines()
    assert json.loads(line)["offences"] == {"consumed in an earlier round": [*names]}


@pytest.mark.parametrize("packing", ["sequences", "shared_prompt"])
def test_packed_rows_are_located_by_row_and_segment(tmp_path: Path, packing: str) -> None:
    batching = {"packing": packing, "row_tokens": 64}
    config = configuration(str(tmp_path), batching=batching, policy={"context_length": 64})
    run = Run.create_or_open(config)
    groups = [group(name, [0.0, 1.0, 1.0, 0.0], completion=range(8, 20)) for name in "ghi"]
    build_round(run, 0, commit_round(run, 0, [groups]))
    told = read_dispositions(run, 0)
    places = list(zip(told["row"].to_pylist(), told["segment"].to_pylist(), strict=True))
    # Rows of four sequences of 15 tokens, or of a group: its prompt of 3 and four times 12.
    assert places == [(row, segment) for row in range(3) for segment in range(1, 5)]
    assert audit_round(run, 0).problems == ()


def test_a_wrong_segment_of_a_packed_row_is_named(tmp_path: Path) -> None:
    batching = {"packing": "shared_prompt", "row_tokens": 64}
    config = configuration(str(tmp_path), batching=batching, policy={"context_length": 64})
    run = Run.create_or_open(config)
    build_round(run, 0, commit_round(run, 0, [[group("g", [0.0, 1.0, 1.0, 0.0])]]))
    found = _retold(run, lambda table: _set(table, "g/2", "segment", 4))
    assert found.offences == {
        "not where its disposition says": ("g/2",),
        "in the batches and in no disposition": ("g/2",),
    }


@pytest.mark.parametrize(
    ("column", "value", "kind"),
    [
        ("n_tokens", 99, "disposition of other tokens"),
        ("environment", "chat", "disposition of another environment"),
        ("policy_version_min", 7, "disposition of another policy"),
    ],
)
def test_rollouts_of_which_the_shards_say_otherwise_are_named(tmp_path, column, value, kind):
    report = _tampered(tmp_path, lambda table: _set(table, "h/1", column, value))
    assert report.offences == {kind: ("h/1",)}
    assert not all(balance.balanced for balance in report.balances)


def test_rollouts_with_the_digest_of_other_parameters_are_named(tmp_path: Path) -> None:
    run = _run(tmp_path)
    of_version = next(iter_shards(run, 0, ["policy_version_min"]))["policy_version_min"][0].as_py()
    checkpoint(run, of_version, extra={"parameters_digest": "d" * 64})
    assert audit_round(run, 0).problems == ()
    run.store.delete(f"{checkpoint_slot(of_version)}/manifest.json")
    checkpoint(run, of_version, extra={"parameters_digest": "f" * 64})
    (kind,) = audit_round(run, 0).offences
    assert kind == "sampled by other parameters than their version's"


def test_a_round_is_counted_by_environment_and_policy_in_rollouts_and_tokens(tmp_path):
    batching, filters = {"staleness_rounds_max": 1}, {"truncated": True}
    run = Run.create_or_open(configuration(str(tmp_path), batching=batching, filters=filters))
    cut = {"status": "truncated", "completion": range(10, 20), "version": 5}
    groups = [
        group("new", [0.0, 1.0], completion=[1, 2, 3, 4], version=5),
        group("long", [0.0, 1.0], **cut),
        group("failed", [None, 1.0, 0.0], completion=[1, 2], version=5),
        group("old", [0.0, 1.0], version=3),
    ]
    build_round(run, 5, commit_round(run, 5, [groups]))
    report = audit_round(run, 5)
    assert report.problems == ()
    old, new = report.balances
    assert (old.environment, old.policy_version) == ("echo", 3)
    assert dict(old.rollouts) == {
        "generated": 2, "consumed": 0, "filtered": 0, "stale": 2, "failed": 0,
    }  # fmt: skip
    assert dict(old.tokens) == {
        "generated": 10, "consumed": 0, "filtered": 0, "stale": 10, "failed": 0,
    }  # fmt: skip
    assert (old.mean_length, old.length_bias) == (None, None)
    # Prompts have 3 tokens: twice 7, twice 13 and three times 5.
    assert dict(new.tokens) == {
        "generated": 55, "consumed": 24, "filtered": 26, "stale": 0, "failed": 5,
    }  # fmt: skip
    assert new.balanced
    assert [(lost.disposition, lost.reason, lost.rollouts) for lost in new.dropped] == [
        ("failed", "no_reward", 1),
        ("filtered", "truncated", 2),
    ]
    assert [lost.mean_length for lost in new.dropped] == [2.0, 10.0]
    assert new.mean_length == 3.0  # of 4, 4, 2 and 2
    assert new.length_bias == pytest.approx(22 / 3 - 3)
