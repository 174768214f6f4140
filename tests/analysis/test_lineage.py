"""Lineage: every edge is one of a manifest, disposition or rollout, in text, JSON and Mermaid."""

import json
import shutil
from pathlib import Path

import pytest
from support.run_factories import commit_round, configuration, group_of, play, rollout, whole_run
from typer.testing import CliRunner

from marin_rl.analysis.diff import compare_runs
from marin_rl.analysis.lineage import (
    Edge,
    Lineage,
    as_text,
    as_tree,
    mermaid,
    trace,
    trace_forward,
    write_graph,
)
from marin_rl.batching.build import build_round
from marin_rl.cli import app
from marin_rl.errors import ConfigError, InputError, ObjectMissing
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.runs import Run, checkpoint_slot, latest_checkpoint
from marin_rl.storage.upkeep.forks import fork_run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds, and a fork from round 1 that has played one."""
    root = tmp_path_factory.mktemp("runs")
    fork = fork_run(whole_run(str(root), 3), 1, "fork", ["objective.advantage=grpo"])
    start = latest_checkpoint(fork)
    assert start is not None
    play(fork, 1, start)
    return root


@pytest.fixture
def run(root: Path) -> Run:
    return Run.open(str(root), "run")


def sources(graph: Lineage, name: str) -> set[str]:
    return {edge.source for edge in graph.edges if edge.made == name}


def test_an_update_leads_back_to_all_it_was_made_from(run: Run) -> None:
    graph = trace(run, 1, step=0, row=2)
    update, row, rollout = "round 1, step 0", "round 1, step 0, row 2", "run/round-00001/group-0/2"
    assert sources(graph, checkpoint_slot(2)) == {update}
    assert sources(graph, update) == {row, checkpoint_slot(1), "run"}
    assert sources(graph, row) == {rollout, "batches/round-00001"}
    assert sources(graph, rollout) == {
        "rollouts/round-00001/shard-0000.parquet", checkpoint_slot(1),
    }  # fmt: skip
    assert sources(graph, "rollouts/round-00001") == {checkpoint_slot(1)}
    assert sources(graph, checkpoint_slot(1)) == {"run"}
    assert sources(graph, "run") == set()
    facts = graph.nodes[rollout].facts
    assert facts["text"] == "user: what?\nassistant: HI"
    assert facts["tokenizer_digest"] == "e" * 64
    assert facts["reward"] == 1.0
    assert graph.nodes[row].facts["advantage"] == 0.5  # 1 - (0 + 1 + 0.5) / 3
    sealed = read_manifest(run.store, "rollouts/round-00001")
    assert sealed is not None
    shard = graph.nodes["rollouts/round-00001/shard-0000.parquet"].facts["sha256"]
    assert shard == sealed[0].parts[0].sha256
    assert graph.nodes["rollouts/round-00001"].facts["manifest"] == sealed[1]
    assert graph.nodes["run"].facts["seed"] == 0


def test_a_round_has_all_its_rollouts(run: Run) -> None:
    kinds = [node.kind for node in trace(run, 0).nodes.values()]
    assert (kinds.count("rollout"), kinds.count("shard"), kinds.count("update")) == (8, 2, 1)
    with pytest.raises(ObjectMissing, match="no rollout stands in step 7"):
        trace(run, 0, step=7)
    with pytest.raises(ObjectMissing, match="is not committed"):
        trace(run, 9)


def test_a_rollout_leads_on_to_every_update_it_influenced(run: Run) -> None:
    graph = trace_forward(run, "run/round-00001/group-1/3")
    told = {n.name: n.facts.get("influenced") for n in graph.nodes.values()}
    assert told[checkpoint_slot(2)] == "directly"
    assert told[checkpoint_slot(3)] == "through the parameters"
    assert checkpoint_slot(4) not in told
    rows = {f"round 1, step 0, row {row}": row for row in (4, 5, 6, 7)}  # its group
    assert sources(graph, "round 1, step 0") == {*rows, "run"}
    for name, row in rows.items():
        facts = graph.nodes[name].facts
        assert facts.get("of") == (None if row == 7 else f"run/round-00001/group-1/{row - 4}")
        assert facts.get("influenced") == (None if row == 7 else "through the baseline")
    assert Edge(checkpoint_slot(3), checkpoint_slot(2)) in graph.edges
    with pytest.raises(ObjectMissing, match="no processed round of run 'run' has a rollout 'x'"):
        trace_forward(run, "x")


def test_a_forks_lineage_ends_in_the_run_that_sampled(root: Path) -> None:
    fork = Run.open(str(root), "fork")
    assert "run" in trace(fork, 0).nodes
    later = trace(fork, 1)
    assert sources(later, checkpoint_slot(1)) == {"run"}
    assert "fork/round-00001/group-0/0" in later.nodes
    assert sources(later, "round 1, step 0") >= {"fork", checkpoint_slot(1)}
    assert "fork" not in trace(fork, 0).nodes
    record = json.loads((root / "fork" / "run.json").read_bytes())
    assert later.nodes["fork"].facts["config_digest"] == record["content_digest"]
    assert later.nodes["run"].facts["config_digest"] != record["content_digest"]
    again = trace_forward(fork, "run/round-00000/group-0/0")
    assert checkpoint_slot(2) in again.nodes
    assert checkpoint_slot(3) not in again.nodes  # the parent went on without it


def test_a_fork_from_round_0_begins_with_its_parents_checkpoint(root: Path) -> None:
    fork = fork_run(Run.open(str(root), "run"), 0, "fresh")
    try:
        start = latest_checkpoint(fork)
        assert start is not None
        play(fork, 0, start)
        graph = trace(fork, 0)
        assert sources(graph, checkpoint_slot(0)) == {"run"}
        assert "fresh" in sources(graph, "round 0, step 0")
        assert graph.nodes["run"].facts["url"] == str(root / "run" / "run.json")
    finally:
        shutil.rmtree(root / "fresh")


GROUP, ROUND = [(0, 0), (0, 1), (0, 2)], [(step, row) for step in (0, 1) for row in (0, 1, 2)]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("advantage", "of_first", "of_cut", "of_later"),
    [
        ("rloo", GROUP, GROUP, [1]),
        ("reinforce", [(0, 0)], [], [1]),
        ("reinforce_batch", ROUND, ROUND, [0, 1]),
    ],
)
def test_a_rollout_counts_where_others_were_compared_to_it(
    tmp_path: Path,
    advantage: str,
    of_first: list[tuple[int, int]],
    of_cut: list[tuple[int, int]],
    of_later: list[int],
    passes: int,
) -> None:
    """Also one that was cut off; and what follows in the round starts from what it moved."""
    objective = {"overlong": "mask", "advantage": advantage}
    sections = {"batching": {"sequences_per_step": 3}, "training": {"epochs": passes}}
    config = configuration(str(tmp_path), groups=2, objective=objective, **sections)
    run = Run.create_or_open(config)
    groups = []
    for name in ("a", "b"):
        members = [rollout(f"{name}/{i}", index=i, reward=float(i % 2)) for i in range(3)]
        cut = rollout(f"{name}/3", index=3, reward=1.0, status="truncated")
        groups.append(group_of(name, [*members, cut]))
    build_round(run, 0, commit_round(run, 0, [groups]))

    def traced(rollout_id: str, kind: str) -> list[str]:
        nodes = trace_forward(run, rollout_id).nodes.values()
        return [node.name for node in nodes if node.kind == kind]

    for name, expected in (("a/0", of_first), ("a/3", of_cut)):
        rows = [f"round 0, step {step}, row {row}" for step, row in expected]
        assert traced(name, "batch row") == rows
        every = ["round 0, step 0", "round 0, step 1"] if expected else []
        assert traced(name, "update") == every
    assert traced("a/3", "disposition") == ["filtered: overlong"]
    again = [0] if passes == 2 and 0 not in of_later else []
    assert traced("b/0", "update") == [f"round 0, step {step}" for step in of_later + again]


def test_text_json_and_mermaid(run: Run, tmp_path: Path) -> None:
    graph = trace(run, 1, step=0, row=2)
    assert "assistant: HI" in "\n".join(as_text(graph))
    tree = json.loads(json.dumps(as_tree(graph)))
    assert len(tree["nodes"]) == len(graph.nodes)
    write_graph(graph, tmp_path / "graph.mmd")
    assert (tmp_path / "graph.mmd").read_text() == mermaid(graph)
    lines = mermaid(graph).splitlines()
    assert lines[0] == "flowchart LR"
    # The rollout's checkpoint is told by its shard already, and the update's run by its checkpoint.
    assert sum(" --> " in line for line in lines) == len(graph.edges) - 3
    with pytest.raises(InputError, match=r"expected a name ending in .mmd, found .svg"):
        write_graph(graph, tmp_path / "graph.svg")


def test_runs_are_compared_by_what_they_did(root: Path, run: Run, tmp_path: Path) -> None:
    found = compare_runs(run, Run.open(str(root), "fork"))
    assert (found.parts_at, found.stage) == (1, "rollouts")
    assert 'objective.advantage: "rloo" -> "grpo"' in found.settings
    reward = next(curve for curve in found.curves if curve.metric == "reward")
    assert (reward.round, reward.first, reward.second, reward.largest) == (1, 0.625, 0.625, 0.0)
    shutil.copytree(root / "run", tmp_path / "run")
    same = compare_runs(run, Run.open(str(tmp_path), "run"))
    assert (same.parts_at, same.rounds, same.settings) == (None, 4, ())


def invoke(root: Path, *arguments: str):
    runner = CliRunner(env={"COLUMNS": "200"})
    return runner.invoke(app, [*arguments, "--root", str(root)])


def test_an_update_of_many_rows_fits_a_screen(root: Path) -> None:
    told = invoke(root, "lineage", "run", "--round", "1").output.splitlines()
    every = invoke(root, "lineage", "run", "--round", "1", "--rows").output.splitlines()
    rows = [line for line in every if line.startswith("batch row: ")]
    assert len(rows) > 2
    assert f"    <- {len(rows)} batch rows" in told
    assert sum("advantage: " in line for line in told) == 1
    assert not any(line.startswith(("batch row: ", "rollout: ")) for line in told)
    assert len(told) < 60 < len(every)


def test_the_commands_print_and_end_as_they_should(root: Path, tmp_path: Path) -> None:
    assert "assistant: HI" in invoke(root, "lineage", "run", "--step", "0", "--row", "1").output
    told = invoke(root, "lineage", "run", "--reverse", "--rollout", "run/round-00001/group-1/3")
    assert "influenced: directly" in told.output
    assert isinstance(invoke(root, "lineage", "run", "--reverse").exception, ConfigError)
    graph = tmp_path / "graph.mmd"
    tree = json.loads(invoke(root, "lineage", "run", "--json", "--graph", str(graph)).stdout)
    assert {"nodes", "edges", "left_out"} == set(tree)
    assert graph.exists()
    parted = invoke(root, "diff", "run", "fork")
    assert parted.exit_code == 1
    assert "they part at round 1, in its rollouts" in parted.output
    assert json.loads(invoke(root, "diff", "run", "fork", "--json").stdout)["parts_at"] == 1
    assert invoke(root, "diff", "run", "run").exit_code == 0
    lines = invoke(root, "audit", "run", "--json").stdout.splitlines()
    assert [json.loads(line)["balances"][0]["tokens"]["consumed"] for line in lines] == [40] * 3
    whole = invoke(root, "fsck", "run", "--json")
    assert (whole.exit_code, json.loads(whole.stdout)["whole"]) == (0, True)
    cleaned = invoke(root, "gc", "run", "--keep-last", "2", "--dry-run", "--json")
    assert json.loads(cleaned.stdout)["garbage"] == []  # the fork reaches the rest
    made = invoke(root, "fork", "run", "--round", "2", "--run-id", "other", "--json")
    (ancestor,) = json.loads(made.stdout)["ancestors"]
    assert (ancestor["run_id"], ancestor["through_round"]) == ("run", 2)
    planned = CliRunner().invoke(app, ["run", str(root / "other"), "--dry-run"])
    assert "Plan of other" in planned.output
