"""A true run passes; every later alteration is named, by metric and round."""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from support.policy_runs import play_two_rounds
from typer.testing import CliRunner

from marin_rl.analysis.lineage import trace_forward
from marin_rl.analysis.query import sql
from marin_rl.analysis.recompute import NORMS
from marin_rl.analysis.scan import scan_dispositions, scan_rollouts, scan_scores
from marin_rl.analysis.verify import UNREADABLE, Finding, _compare, not_checked, verify_run
from marin_rl.cli import app
from marin_rl.config import load_config
from marin_rl.errors import ObjectMissing
from marin_rl.metrics import LARGEST
from marin_rl.rollouts.curriculum import Curriculum
from marin_rl.storage.commits import committed_manifest
from marin_rl.storage.layout import rollouts_slot
from marin_rl.storage.runs import Run, checkpoint_slot, metrics_key
from marin_rl.storage.tables.metrics import read_metrics, write_round_metrics
from marin_rl.storage.tables.parquet import open_part
from marin_rl.storage.tables.scores import scores_writer
from marin_rl.storage.upkeep.audit import audit_run
from schemas.manifests import sealed_json
from schemas.migrations import SCORES as SCORES_LADDER
from schemas.tables import SCORES

pytestmark = pytest.mark.usefixtures("compiled_quickly")

DEBUG = Path(__file__).parents[2] / "configs/debug.yaml"
SETTINGS = (
    "objective.kl_coefficient=0.1", "objective.ratio_level=token", "evaluation.samples=3",
    "evaluation.k=[1,3]", "batching.sequences_per_step=6", "sampling.max_tokens=6",
    "training.learning_rate=1e-2", "policy.model.layers=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a run of two rounds of three steps each, with a reference and an evaluation."""
    root = tmp_path_factory.mktemp("runs")
    adapter = ("policy.lora.rank=2", "policy.lora.learning_rate_factor=2")
    run = Run.create_or_open(load_config(DEBUG, [f"root={root}", *SETTINGS, *adapter]))
    play_two_rounds(run, evaluated=True)
    return root


# Between them all surrogates but ppo_clip, reinforce and sapo, every correction and way to reject,
# every place of KL, every way to fill rows.
OBJECTIVES = {
    "a teacher, packed with prompts shared": (
        "distillation.coefficient=0.5", "objective.ratio_level=token",
        "batching.packing=shared_prompt", "batching.row_tokens=128",
    ),
    "packed dppo": (
        "batching.packing=sequences", "batching.row_tokens=64", "objective.surrogate=dppo",
        "objective.ratio_level=token", "objective.clip_low=0.02", "objective.clip_high=0.02",
        "objective.importance_correction=masked", "objective.correction_low=0.81",
        "sampling.top_p=0.8",
        "objective.entropy_coefficient=0.1", "objective.overlong=soft_penalty",
    ),
    "shared gspo": (
        "batching.packing=shared_prompt", "batching.row_tokens=64", "objective.surrogate=gspo",
        "objective.ratio_level=sequence_mean", "objective.clip_high=0.001",
        "objective.kl_placement=reward", "objective.kl_coefficient=0.5", "objective.kl_target=0.01",
        "objective.kl_rate=1",
    ),
    "steered cispo": (
        "objective.surrogate=cispo", "objective.clip_high=0.001", "objective.kl_coefficient=0.5",
        "objective.kl_target=0.01", "objective.kl_rate=1", "objective.reference=average",
        "objective.importance_correction=truncated", "objective.correction_level=sequence",
        "objective.kl_estimator=k3_k2_gradient", "objective.cispo_clip_low=0.001",
    ),
    "gmpo, opo, rejection": (
        "objective.surrogate=gmpo", "objective.ratio_level=sequence_mean",
        "objective.advantage=opo", "objective.clip_low=0.01", "objective.clip_high=0.01",
        "objective.importance_correction=truncated", "objective.correction_low=0.9",
        "objective.rejection=k3", "objective.rejection_level=sequence_max",
        "objective.rejection_high=0.01", "sampling.top_p=0.8",
    ),
    "dppo_kl, remax, token_sum": (
        "objective.surrogate=dppo_kl", "objective.ratio_level=token",
        "objective.advantage=remax", "rollouts.greedy_baseline=true",
        "objective.clip_low=0.001", "objective.clip_high=0.001", "objective.aggregation=token_sum",
    ),
    "dro, rejection alone": (
        "objective.surrogate=dro", "objective.dro_beta=0.5", "batching.packing=sequences",
        "batching.row_tokens=64", "objective.importance_correction=rejected",
        "objective.rejection=k1", "objective.rejection_level=sequence_mean",
        "objective.rejection_high=1e-8",
    ),
    "packed reinforce++": (
        "recipe=recipes/reinforce_pp.yaml", "objective.kl_coefficient=0.5",
        "batching.packing=sequences", "batching.row_tokens=64",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("choices", OBJECTIVES.values(), ids=OBJECTIVES)
def test_runs_of_every_kind_of_objective_and_rows_pass(tmp_path: Path, choices) -> None:
    reduced = [each for each in SETTINGS if not each.startswith(("objective.", "evaluation."))]
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}", *reduced, *choices]))
    play_two_rounds(run, evaluated=True)
    findings = list(verify_run(run))
    assert [found.message for found in findings if found.problem] == []
    found_in = {found.metric: found.found for found in findings if found.round == 1}
    assert {"loss", "val/ratio", "scores/advantages", "scores/ratios"} <= set(found_in)
    assert [audit.problems for audit in audit_run(run)] == [(), ()]
    scores = scan_scores(tmp_path, "debug").collect()
    places = scan_dispositions(tmp_path, "debug").filter(disposition="consumed").collect()
    joined = scores.join(places, on="rollout_id", validate="1:1", suffix="_told")
    assert joined.height == scores.height == places.height
    for name in ("step", "row", "segment"):
        assert joined[name].to_list() == joined[f"{name}_told"].to_list()
    layout = run.config.batching.layout
    assert (scores["segment"].max() > 1) == (layout != "none")
    objective = run.config.objective
    assert (scores["old_logprobs"].null_count() == 0) == (objective.importance_correction != "none")
    assert (scores["reference_logprobs"].null_count() == 0) == (objective.kl_coefficient > 0)
    if objective.kl_target is not None:  # so far from the target, it moves by a whole fifth
        assert found_in["objective/kl_coefficient"] in (pytest.approx(0.4), pytest.approx(0.6))
    if objective.kl_placement == "reward":
        assert found_in["objective/kl"] != 0
        apart = joined.filter(round=1).select(
            (pl.col("advantages").list.first() - pl.col("advantage")).abs().max()
        )
        assert apart.item() > 1e-6  # the scores have the advantages that were trained on
    if objective.importance_correction == "masked":
        off = pl.col("clipped").list.sum().sum()
        assert scores.select(off).item() > 0


# Between them both trunks, both places of KL, whitened or not, one sequence a row and several.
CRITICS = {
    "own": ("recipe=recipes/ppo.yaml", "training.epochs=1", "training.critic.warmup_rounds=1"),
    "shared": (
        "recipe=recipes/ppo.yaml", "training.epochs=1", "training.critic.trunk=shared",
        "training.critic.gamma=0.9", "training.critic.value_clip=0.01",
        "objective.kl_placement=loss", "objective.advantage_scale=none",
        "rollouts.group_size=1", "rollouts.groups_per_round=16", "batching.packing=sequences",
        "batching.row_tokens=64", "training.critic.learning_rate=1e-2",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("choices", CRITICS.values(), ids=CRITICS)
def test_runs_with_a_critic_pass_and_what_it_said_is_checked(tmp_path: Path, choices) -> None:
    reduced = [each for each in SETTINGS if not each.startswith(("objective.", "evaluation."))]
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}", *reduced, *choices]))
    play_two_rounds(run, evaluated=True)
    findings = list(verify_run(run))
    assert [found.message for found in findings if found.problem] == []
    found_in = {found.metric: found.found for found in findings if found.round == 1}
    assert {
        "loss", "loss/value_avg", "val/clipfrac_avg", "critic/explained_variance", "kl",
        "scores/returns", "scores/advantages",
    } <= set(found_in)  # fmt: skip
    assert [audit.problems for audit in audit_run(run)] == [(), ()]
    scores = scan_scores(tmp_path, "debug").collect()
    assert all(scores[name].null_count() == 0 for name in ("values", "old_values", "returns"))
    moved = scores.select((pl.col("values").explode() - pl.col("old_values").explode()).abs().max())
    assert moved.item() > 1e-4  # later steps of a round see another critic than the first


BASELINES = {
    "rows apart": ("objective.entropy_coefficient=0.01",),
    "shared prompts, corrected": (
        "batching.packing=shared_prompt", "batching.row_tokens=64",
        "objective.importance_correction=masked", "objective.correction_low=0.81",
        "sampling.top_p=0.8", "sampling.temperature=0.9",
    ),
}  # fmt: skip


def with_other_norms(run: Run, round: int) -> None:
    """Write the scores of a round again, with the fourth power of every norm."""
    slot = checkpoint_slot(round + 1)
    manifest = committed_manifest(run.store, slot)
    (part,) = (part for part in manifest.parts if part.name.startswith("scores-"))
    reader = open_part(run.store, slot, part, SCORES_LADDER)
    writer = scores_writer(SCORES, {"attempt": manifest.attempt, "eos_token_id": "1"})
    for index in range(reader.row_groups):
        table = reader.group(index, SCORES).combine_chunks()
        place = table.schema.get_field_index(NORMS)
        column = table[NORMS].combine_chunks()
        values = pa.array(column.flatten().to_numpy() ** 4, pa.float32())
        column = pa.ListArray.from_arrays(column.offsets, values, type=column.type)
        writer.write(table.set_column(place, table.schema.field(place), column))
    data = writer.finish()
    path, record = (run.store.local_path(f"{slot}/{name}") for name in (part.name, "manifest.json"))
    assert path is not None
    assert record is not None
    path.write_bytes(data)
    said = json.loads(record.read_bytes())
    del said["digest"]
    (entry,) = (entry for entry in said["parts"] if entry["name"] == part.name)
    entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    record.write_bytes(sealed_json(said))


@pytest.mark.slow
@pytest.mark.parametrize("choices", BASELINES.values(), ids=BASELINES)
def test_runs_with_an_optimal_token_baseline_pass_and_it_is_checked(tmp_path, choices):
    reduced = [each for each in SETTINGS if not each.startswith(("objective.", "evaluation."))]
    # Probabilities and lengths differ much, so that weights and what is compared do.
    varied = (
        "objective.advantage=optimal_token_baseline", "objective.ratio_level=token",
        "policy.model.initializer_range=0.3", "rollouts.group_size=8",
        "objective.overlong=soft_penalty", "objective.overlong_buffer=1.0",
    )  # fmt: skip
    settings = [f"root={tmp_path}", *reduced, *varied, *choices]
    run = Run.create_or_open(load_config(DEBUG, settings))
    play_two_rounds(run)
    findings = list(verify_run(run))
    assert [found.message for found in findings if found.problem] == []
    found_in = {found.metric for found in findings if found.round == 1}
    assert {"loss", "scores/advantages", f"scores/{NORMS}"} <= found_in
    assert [audit.problems for audit in audit_run(run)] == [(), ()]
    scores = scan_scores(tmp_path, "debug").collect()
    norms, values = scores[NORMS].explode(), scores["values"]
    assert (norms.null_count(), values.null_count()) == (0, len(values))
    assert norms.min() >= 0
    assert 0 < norms.max() <= 2
    places = scan_dispositions(tmp_path, "debug").filter(disposition="consumed").collect()
    assert places["advantage"].null_count() == places.height > 0
    joined = scores.join(places.select("rollout_id", "group_id"), on="rollout_id")
    tokens = joined.select("advantages").explode("advantages")["advantages"]
    assert tokens.is_finite().all()
    spread = joined.select(pl.col("advantages").list.max() - pl.col("advantages").list.min())
    assert spread.to_series().max() > 1e-3  # it differs from token to token
    group = joined.filter(round=1, group_id=joined.filter(round=1)["group_id"][0])["rollout_id"]
    rows = trace_forward(run, group[0]).nodes.values()
    others = {row.facts.get("of") for row in rows} - {None}
    assert others  # the baselines of others are made of it
    assert others <= set(group[1:])
    with_other_norms(run, 1)
    wrong = {found.metric for found in verify_run(run) if found.problem and found.round == 1}
    assert {f"scores/{NORMS}", "scores/advantages"} <= wrong


@pytest.fixture
def copy(played: Path, tmp_path: Path) -> Run:
    """The same run, to be altered."""
    shutil.copytree(played / "debug", tmp_path / "debug")
    return Run.open(str(tmp_path), "debug")


def checked_in(findings: Sequence[Finding], round: int) -> set[str]:
    return {found.metric for found in findings if found.round == round and not found.unchecked}


def test_a_true_run_passes(played: Path) -> None:
    findings = list(verify_run(Run.open(str(played), "debug")))
    assert [found.message for found in findings if found.problem] == []
    checked = checked_in(findings, 1)
    assert {
        "loss", "loss/policy_avg", "kl", "objective/kl", "objective/rlhf_reward", "val/ratio",
        "clip_ratio/region", "mismatch_kl", "reward", "storage/bytes", "episode", "env/echo/errors",
        "completions/mean_length", "replay/enqueue", "val/num_eos_tokens", "train/output_length",
        "lr", "updates/steps", "eps", "env/echo/eps", "perf/tokens_per_second",
    } <= checked  # fmt: skip
    assert "eval/pass@3/low" in {found.metric for found in findings if found.round == 0}
    untold = {"timing_s/round", "grad_norm", "weights/seconds"}
    assert not checked & untold
    assert untold <= {found.metric for found in findings if found.unchecked}
    (row,) = read_metrics(Run.open(str(played), "debug"), [1]).to_pylist()
    named = {name for name, value in row.items() if value is not None} - {"run_id", "round"}
    assert named <= {found.metric for found in findings if found.round == 1}


def test_weights_by_hand_of_an_earlier_version_are_taken_as_recorded(copy, tmp_path):
    manifest = tmp_path / "debug" / rollouts_slot(1) / "manifest.json"
    told = json.loads(manifest.read_bytes())
    del told["digest"]
    by_hand = Curriculum(kind="weights", policy_version=1, rounds=(), weights={"": 1})
    told["extra"]["curriculum"] = by_hand.record
    manifest.write_bytes(sealed_json(told))
    assert [found.message for found in verify_run(copy, 1) if found.problem] == []


def test_means_over_several_passes_are_named_as_not_checked(copy: Run, tmp_path: Path) -> None:
    config = tmp_path / "debug/run.json"
    told = json.loads(config.read_text())
    del told["digest"]
    told["config"]["training"]["epochs"] = 4
    config.write_bytes(sealed_json(told))
    findings = list(verify_run(Run.open(str(tmp_path), "debug")))
    reason = "scores are kept of the first of 4 passes"
    silent = {found.metric for found in findings if found.unchecked == reason}
    assert {"loss", "val/ratio", "entropy", "kl", "objective/rlhf_reward"} <= silent
    assert "mismatch_kl" in checked_in(findings, 1)
    assert any(
        line.startswith(f"not checked ({reason}): clip_ratio/high, ")
        for line in not_checked(findings)
    )


def test_metrics_that_rows_of_earlier_versions_lack_are_missed_in_no_such_row(copy: Run) -> None:
    late = {
        f"sampling/{name}": None
        for name in ("perplexity/trainer", "perplexity/sampler", "perplexity/ratio",
                     "chi2/token", "chi2/sequence")
    }  # fmt: skip
    checked = checked_in(list(verify_run(copy, 1)), 1)
    assert set(late) <= checked
    altered(copy, 1, **{"sampling/chi2/token": None})
    (found,) = (found for found in verify_run(copy, 1) if found.problem)
    assert found.message.startswith("round 1: sampling/chi2/token is missing from the row")
    altered(copy, 1, **late)
    findings = list(verify_run(copy, 1))
    assert [found.message for found in findings if found.problem] == []
    assert not set(late) & {found.metric for found in findings}


def test_the_learning_rate_of_a_round_with_a_refused_update_is_not_known(copy: Run) -> None:
    altered(copy, 1, **{"updates/skipped": 1.0, "lr": 9.0})
    (found,) = (found for found in verify_run(copy, 1) if found.metric == "lr")
    assert found.unchecked == "an update of the round was refused"


def test_the_steps_were_not_all_on_policy(played: Path) -> None:
    """Otherwise ratios of exactly 1 would prove nothing."""
    ratios = scan_scores(played, "debug").select(pl.col("ratios").explode()).collect()["ratios"]
    assert ratios.std() > 1e-3


def altered(run: Run, round: int, **changes: float | None) -> None:
    """Write the metrics row of a round again, with other values."""
    (row,) = read_metrics(run, [round]).to_pylist()
    kept = {name: value for name, value in row.items() if name not in ("run_id", "round")}
    told = {name: value for name, value in (kept | changes).items() if value is not None}
    run.store.delete(metrics_key(round))
    write_round_metrics(run, round, told)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("reward", 0.75, "round 1: reward differs: expected "),
        ("lr", 0.5, "round 1: lr differs: expected "),
        ("updates/steps", 9.0, "round 1: updates/steps differs: expected 6"),
        ("eps", 1e6, "round 1: eps differs: expected "),
        ("loss", 1.0, "round 1: loss differs: expected "),
        ("eval/accuracy", 0.5, "round 1: (unreadable)"),
        ("kl", None, "round 1: kl is missing from the row: expected "),
        ("rewards/other/mean", 1.0, "round 1: rewards/other/mean is in the row, but no file"),
    ],
)
def test_an_altered_row_is_detected(copy: Run, name: str, value: float | None, told: str) -> None:
    altered(copy, 1, **{name: value})
    wrong = [found for found in verify_run(copy, 1) if found.problem]
    if told.endswith(UNREADABLE):  # an evaluation that was never made
        assert "evals/round-00001 is not committed" in wrong[0].message
    else:
        assert wrong[0].message.startswith(told)
        assert f"found {'none' if value is None else f'{value:.9g}'}" in wrong[0].message


@pytest.mark.parametrize(
    "pattern",
    [
        "rollouts/round-00000/shard-0001.parquet",
        "batches/round-00000/batches-*.parquet",
        "batches/round-00000/dispositions-*.parquet",
        "checkpoints/round-00001/scores-*.parquet",
        "evals/round-00000/evals-*.parquet",
    ],
)
def test_an_altered_file_is_detected(copy: Run, tmp_path: Path, pattern: str) -> None:
    (path,) = (tmp_path / "debug").glob(pattern)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    wrong = [found for found in verify_run(copy, 0) if found.problem]
    assert [(found.round, found.metric) for found in wrong] == [(0, UNREADABLE)]
    assert path.name in wrong[0].problem


def test_the_command_says_what_differs_and_fails(copy: Run, tmp_path: Path) -> None:
    def invoke(*arguments: str):
        runner = CliRunner(env={"NORMSS": "200"})
        return runner.invoke(
            app, ["metrics", "verify", "debug", "--root", str(tmp_path), *arguments]
        )

    true = invoke()
    assert true.exit_code == 0, true.output
    assert "objective/rlhf_reward" in true.output
    assert "not checked (no file gives it again): grad_norm, " in true.output
    altered(copy, 0, entropy=9.0)
    wrong = invoke()
    assert wrong.exit_code == 1
    assert "round 0: entropy differs: expected " in wrong.output
    assert "found 9" in wrong.output
    assert invoke("--round", "1").exit_code == 0
    lines = [json.loads(line) for line in invoke("--json", "--round", "0").stdout.splitlines()]
    (found,) = [line for line in lines if line["problem"]]
    assert (found["metric"], found["round"], found["found"]) == ("entropy", 0, 9.0)


def test_a_run_without_closed_rounds_is_an_error(tmp_path: Path) -> None:
    run = Run.create_or_open(load_config(DEBUG, [f"root={tmp_path}"]))
    with pytest.raises(ObjectMissing, match="no round has been closed"):
        list(verify_run(run))


def test_scores_join_their_rollouts_token_by_token(played: Path) -> None:
    scores = scan_scores(played, "debug").collect()
    assert scores.height == 32
    assert scores["round"].unique().sort().to_list() == [0, 1]
    rollouts = scan_rollouts(played, "debug").collect()
    for row in scores.join(rollouts, on="rollout_id").iter_rows(named=True):
        assert row["positions"] == [i for i, on in enumerate(row["loss_mask"]) if on]
        assert row["sampler_logprobs"] == [row["logprobs"][i] for i in row["positions"]]
        assert len(row["entropies"]) == row["n_completion_tokens"]
        assert row["old_logprobs"] is None
        assert row["reference_logprobs"] is not None
    query = """
        with tokens as (
            select round, unnest(trainer_logprobs) as t, unnest(sampler_logprobs) as s from scores
            where step = 0
        )
        select round, max(abs(t - s)) as apart from tokens group by round order by round
    """
    found = sql(played, "debug", query)
    assert found["apart"].max() < 1e-4
    said = read_metrics(Run.open(str(played), "debug"))["sampling/logp_difference/max"]
    assert found["apart"].to_list() == pytest.approx(pa.array(said).to_pylist(), rel=1e-6)


@pytest.mark.parametrize("overflow", [LARGEST, math.inf, -math.inf, math.nan])
def test_rows_of_earlier_versions_lack_what_overflows(played: Path, overflow: float) -> None:
    run = Run.open(str(played), "debug")
    assert list(_compare(run, 0, {}, {"mismatch_kl": overflow})) == []
    (finding,) = _compare(run, 0, {}, {"mismatch_kl": 1e38})
    assert finding.problem == "is missing from the row"
