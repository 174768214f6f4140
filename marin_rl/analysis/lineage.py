"""Lineage: the graph of committed objects behind an update, or behind a rollout in reverse.

Nodes are slots, shards, rollouts and updates; an edge leads from what was made to what it was made
from, as manifests, dispositions and the rollouts themselves say. Everything is read from files.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from marin_rl.analysis.scan import scan_dispositions
from marin_rl.batching.dispositions import advantage_choice
from marin_rl.config import ObjectiveConfig
from marin_rl.errors import CorruptObject, InputError, ObjectMissing
from marin_rl.storage import layout
from marin_rl.storage.commits import committed_manifest, count_in, read_manifest
from marin_rl.storage.run_records import RUN_KEY, read_record
from marin_rl.storage.runs import Run, latest_checkpoint
from marin_rl.storage.tables.batches import dispositions_of, iter_batch_names
from marin_rl.storage.tables.rollouts import iter_shards, rollouts_manifest
from schemas.manifests import Manifest, sha256_of

ROLLOUT_COLUMNS = (
    "rollout_id", "shard", "example_id", "environment", "environment_version", "prompt_seed",
    "policy_version_min", "policy_version_max", "policy_digest", "tokenizer_digest",
    "chat_template_digest", "model", "sampling", "reward", "status", "n_prompt_tokens",
    "n_completion_tokens", "turns", "attempt", "worker",
)  # fmt: skip
TOKEN_VERSIONS = ("policy_versions", "loss_mask")
# Facts about a slot, each with its name in the manifest's `extra`.
SLOT_FACTS = {
    "parameters": "parameters_digest", "adapter": "adapter_digest", "base": "base_digest",
    "quantize_base": "quantize_base", "folder": "folder", "tokenizer": "tokenizer_digest",
    "chat_template": "chat_template_digest", "curriculum": "curriculum",
}  # fmt: skip
STEPS_MAX = 10**6  # of a round
ROLLOUTS_MAX = 64
# Rollouts dropped for these reasons count in baselines all the same (batching.plan).
COMPARED = ("zero_signal", "overlong", "greedy")
BASELINE = "through the baseline"
COUNTED = ("batch row", "rollout")  # kinds of which an update has hundreds

Facts = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Node:
    """A slot, shard, rollout, update or run: its unique name, its kind, and facts about it."""

    name: str
    kind: str
    facts: Facts


@dataclass(frozen=True, slots=True)
class Edge:
    """`made` was made from `source`."""

    made: str
    source: str


@dataclass(slots=True)
class Lineage:
    """A graph, nodes in the order of reading; `left_out` counts rollouts beyond ROLLOUTS_MAX."""

    nodes: dict[str, Node] = field(default_factory=dict)
    edges: dict[Edge, None] = field(default_factory=dict)  # each once, in the order of reading
    left_out: int = 0

    def add(self, kind: str, name: str, sources: Iterable[str] = (), **facts: Any) -> str:
        if name not in self.nodes:
            known = {key: value for key, value in facts.items() if value is not None}
            self.nodes[name] = Node(name, kind, known)
        self.edges |= dict.fromkeys(Edge(name, source) for source in sources)
        return name


def trace(run: Run, round: int, step: int | None = None, row: int | None = None) -> Lineage:
    """Trace an update, or one row of its batch, back to its rollouts and what made them.

    Without `step`, every update of the round. Raises ObjectMissing where nothing was trained on
    there, CorruptObject, NewerSchema.
    """
    batches = committed_manifest(run.store, layout.batches_slot(round))
    consumed = _consumed(run, batches, step, row)
    if not consumed:
        url = run.store.url_of(batches.slot)
        if not (steps := count_in(batches, "steps", url)):
            why = "this round trained on nothing; `marin-rl audit` says what was dropped"
            raise ObjectMissing(f"{url}: {why}")
        named = {"step": step, "row": row}
        place = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
        raise ObjectMissing(f"{url}: no rollout stands in {place}; expected a step below {steps}")
    graph, player = Lineage(left_out=max(len(consumed) - ROLLOUTS_MAX, 0)), run.at_round(round)
    places = consumed[:ROLLOUTS_MAX]
    trained = read_manifest(run.store, layout.checkpoint_slot(round + 1))
    if trained is not None:
        _add_slot(graph, trained[0], [f"round {round}, step {p['step']}" for p in places])
    for place in places:
        name = f"round {round}, step {place['step']}"
        line = f"{name}, row {place['row']}"
        above = [line, layout.checkpoint_slot(round), player.run_id]
        graph.add("update", name, above, round=round, step=place["step"])
        graph.add(
            "batch row", line, [place["rollout_id"], batches.slot], advantage=place["advantage"]
        )
    _add_slot(graph, batches, [parent.slot for parent in batches.parents])
    if (intake := read_manifest(run.store, layout.intake_slot(round))) is not None:
        _add_slot(graph, intake[0], [parent.slot for parent in intake[0].parents])
    # A round may train on rollouts of earlier ones again.
    for number in sorted({int(place["round_generated"]) for place in places}, reverse=True):
        names = [p["rollout_id"] for p in places if p["round_generated"] == number]
        _add_rollouts(graph, run, number, names)
    add_policy(graph, run, layout.checkpoint_slot(round))
    _add_run(graph, player)
    return graph


def trace_forward(run: Run, rollout_id: str) -> Lineage:
    """Trace a rollout to every update of this run that it influenced.

    Direct ones trained on it, or on a row whose advantage its reward decided; later ones started
    from those. Raises ObjectMissing for a rollout that no processed round has.
    """
    frame = scan_dispositions(run.config.root, run.run_id, run.config.storage_options)
    rows = frame.filter(pl.col("rollout_id") == rollout_id).collect().to_dicts()
    if not rows:
        raise ObjectMissing(
            f"no processed round of run {run.run_id!r} has a rollout {rollout_id!r}: expected a "
            f'rollout_id, such as `marin-rl sql {run.run_id} "select rollout_id from rollouts"` '
            "lists"
        )
    place, *again = sorted(rows, key=lambda row: row["round"])
    graph, round = Lineage(), int(place["round"])
    _add_rollouts(graph, run, int(place["round_generated"]), [rollout_id])
    fate = {name: place[name] for name in ("disposition", "reason", "advantage")}
    if place["disposition"] != "consumed":
        graph.add("disposition", f"{place['disposition']}: {place['reason']}", [rollout_id], **fate)
    before = _add_updates(graph, run, place, fate)
    for later in again:  # rounds that trained on its group again
        _add_updates(graph, run, later, {name: later[name] for name in fate})
    if before is None:
        return graph
    latest = latest_checkpoint(run)
    for number in range(round + 1, (latest.number if latest else 0) + 1):
        manifest = committed_manifest(run.store, layout.checkpoint_slot(number))
        directly = "directly" if number == round + 1 else "through the parameters"
        _add_slot(graph, manifest, [before], influenced=directly)
        before = manifest.slot
    return graph


def _add_updates(graph: Lineage, run: Run, place: Mapping[str, Any], fate: Facts) -> str | None:
    """The rows and updates of its round that a rollout influenced; the last update, if any.

    Each update starts from the one before it. With several passes the steps before the first one
    come after the last one, in the second pass.
    """
    round, rollout_id = int(place["round"]), place["rollout_id"]
    player = run.at_round(round)
    batches = committed_manifest(run.store, layout.batches_slot(round))
    consumed = _consumed(run, batches, None, None)
    rows = [row for row in consumed if _depends(row, place, player.config.objective)]
    if not rows:
        return None
    passes = player.config.training.epochs
    steps = count_in(batches, "steps", run.store.url_of(batches.slot), at_most=STEPS_MAX)
    first = min(row["step"] for row in rows)
    rows.sort(key=lambda row: row["rollout_id"] != rollout_id)  # its own row is never left out
    graph.left_out, rows = max(len(rows) - ROLLOUTS_MAX, 0), rows[:ROLLOUTS_MAX]
    before: list[str] = []
    # In the second pass the steps before the first one come after the last one.
    for step in [*range(first, steps), *(range(first) if passes > 1 else ())]:
        name = f"round {round}, step {step}"
        lines = []
        for row in (row for row in rows if row["step"] == step):
            own = row["rollout_id"] == rollout_id
            facts = fate if own else {"of": row["rollout_id"], "influenced": BASELINE}
            line = f"{name}, row {row['row']}"
            lines.append(graph.add("batch row", line, [rollout_id], **facts))
        above = [*lines, *before, player.run_id]
        before = [graph.add("update", name, above, round=round, step=step, passes=passes)]
    _add_run(graph, player)
    return before[0]


def _depends(row: Facts, place: Facts, objective: ObjectiveConfig) -> bool:
    """True if a trained row's advantage depends on a rollout: its own, or one it is compared to.

    Of what was dropped, rewards of groups without signal and of completions that were too long are
    compared all the same; those of failed and of stale ones, and of short groups, are not.
    """
    if row["rollout_id"] == place["rollout_id"]:
        return True
    choice, consumed = advantage_choice(objective), place["disposition"] == "consumed"
    if consumed and objective.whitens_tokens:
        return True
    if choice.facts.needs_critic or not (consumed or place["reason"] in COMPARED):
        return False
    return choice.over_round or (choice.within_groups and row["group_id"] == place["group_id"])


def as_text(graph: Lineage, *, rows: bool = True) -> Iterator[str]:
    """A paragraph per node: its facts and its sources.

    Without `rows`, batch rows and rollouts are counted where there are several.
    """
    kinds = Counter(node.kind for node in graph.nodes.values())
    counted = () if rows else tuple(kind for kind in COUNTED if kinds[kind] > 1)
    told = set[str]()
    for node in graph.nodes.values():
        if node.kind not in counted:
            yield f"{node.kind}: {node.name}"
            for name, value in node.facts.items():
                shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                # No text can look like a line of ours.
                indented = "\n        ".join(shown.split("\n"))
                yield f"    {name}: {indented}"
            yield from _sources(graph, [node], counted)
        elif node.kind not in told:
            told.add(node.kind)
            nodes = [each for each in graph.nodes.values() if each.kind == node.kind]
            yield f"{len(nodes)} {node.kind}s: {nodes[0].name} to {nodes[-1].name}"
            for name in ("advantage", "reward"):
                values = [each.facts[name] for each in nodes if name in each.facts]
                if values:
                    mean = sum(values) / len(values)
                    yield f"    {name}: {min(values):.4g} to {max(values):.4g}, mean {mean:.4g}"
            yield from _sources(graph, nodes, counted)
    if graph.left_out:
        yield f"and {graph.left_out} rollouts more"


def _sources(graph: Lineage, nodes: Sequence[Node], counted: Sequence[str]) -> Iterator[str]:
    """Sources of nodes, each once; those of `counted` kinds as a number."""
    names = {node.name for node in nodes}
    sources = dict.fromkeys(edge.source for edge in graph.edges if edge.made in names)
    kind_of = {name: graph.nodes[name].kind if name in graph.nodes else "" for name in sources}
    for kind in counted:
        if number := sum(own == kind for own in kind_of.values()):
            yield f"    <- {number} {kind}s"
    yield from (f"    <- {name}" for name in sources if kind_of[name] not in counted)


def as_tree(graph: Lineage) -> dict[str, Any]:
    return {
        "nodes": [asdict(node) for node in graph.nodes.values()],
        "edges": [asdict(edge) for edge in graph.edges],
        "left_out": graph.left_out,
    }


def write_graph(graph: Lineage, target: Path) -> None:
    """Write the graph as Mermaid text, to a file named .mmd. Raises InputError for other names."""
    if target.suffix != ".mmd":
        raise InputError(
            f"{target}: expected a name ending in .mmd, found {target.suffix or 'no suffix'}: a "
            "graph is written as Mermaid text, which `mmdc` and Markdown viewers draw"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(mermaid(graph), encoding="utf-8")


def mermaid(graph: Lineage) -> str:
    """The graph as a Mermaid flowchart, sources first, without edges that a longer path implies."""
    ids = {name: f"n{number}" for number, name in enumerate(graph.nodes)}
    titles = (f"{node.kind}: {node.name}".replace('"', "#quot;") for node in graph.nodes.values())
    boxes = (f'    {own}["{title}"]' for own, title in zip(ids.values(), titles, strict=True))
    edges = (edge for edge in _needed(graph) if edge.source in ids)
    arrows = (f"    {ids[edge.source]} --> {ids[edge.made]}" for edge in edges)
    return "\n".join(["flowchart LR", *boxes, *arrows]) + "\n"


def _needed(graph: Lineage) -> list[Edge]:
    """The edges of the transitive reduction: a longer path implies each of the others."""
    sources: dict[str, list[str]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.made, []).append(edge.source)
    above: dict[str, set[str]] = {}

    def reached(name: str) -> set[str]:
        if name not in above:
            direct = sources.get(name, [])
            above[name] = set(direct).union(*(reached(source) for source in direct))
        return above[name]

    return [
        edge
        for edge in graph.edges
        if not any(edge.source in reached(other) for other in sources[edge.made])
    ]


def _consumed(
    run: Run, batches: Manifest, step: int | None, row: int | None
) -> list[dict[str, Any]]:
    """Dispositions of the rollouts that were trained on, by step, row and segment.

    A rollout of several segments is in the row of each.
    """
    dispositions = dispositions_of(run, batches).to_pylist()
    consumed = [place for place in dispositions if place["disposition"] == "consumed"]
    if row is not None:
        named = {place["rollout_id"]: place for place in consumed}
        consumed = [
            named[name] | {"step": at["step"], "row": row, "segment": segment}
            for table in iter_batch_names(run, batches)
            for at in table.to_pylist()
            if at["row"] == row
            for segment, name in enumerate(at["rollout_ids"], start=1)
            if name in named
        ]
    chosen = [place for place in consumed if step in (None, place["step"])]
    return sorted(chosen, key=lambda place: (place["step"], place["row"], place["segment"]))


def _add_slot(graph: Lineage, manifest: Manifest, sources: Sequence[str], **facts: Any) -> None:
    folder = manifest.slot.partition("/")[0]
    kinds = {"checkpoints": "checkpoint", "intakes": "intake", "sft": "warm start"}
    graph.add(
        kinds.get(folder, folder),
        manifest.slot,
        sources,
        manifest=manifest.sha256,
        created_at=manifest.created_at,
        attempt=manifest.attempt,
        **{name: manifest.extra.get(key) for name, key in SLOT_FACTS.items()},
        code=" ".join(f"{name} {value}" for name, value in sorted(manifest.code.items())),
        **facts,
    )


def _add_rollouts(graph: Lineage, run: Run, round: int, names: Sequence[str]) -> None:
    """Rollouts with their text, their shards with digests, and the checkpoints they came from."""
    sealed = rollouts_manifest(run, round)
    digests = {part.name: part.sha256 for part in sealed.parts}
    wanted = set(names)
    rows: dict[str, dict[str, Any]] = {}
    by_token = run.config.mixes_policies
    columns = (*ROLLOUT_COLUMNS, *(TOKEN_VERSIONS if by_token else ()))
    for table in iter_shards(run, round, columns):
        for place, name in enumerate(table["rollout_id"].to_pylist()):
            if name in wanted:
                (rows[name],) = table.slice(place, 1).to_pylist()
    policies = set[str]()
    for name in names:
        row = rows.get(name)
        if row is None:
            raise CorruptObject(
                f"{run.store.url_of(sealed.slot)}: expected the rollout {name!r}, which "
                "dispositions of the round name, found none; `marin-rl audit` compares them"
            )
        shard, version = layout.shard_key(round, row.pop("shard")), row["policy_version_min"]
        turns = [f"{turn['role']}: {turn['content']}" for turn in row.pop("turns")]
        facts = {
            key: value for key, value in row.items() if key not in ("rollout_id", *TOKEN_VERSIONS)
        }
        ages = _tokens_by_version(row, round)
        versions = sorted(map(int, ages)) or [version]
        policies_of = [layout.checkpoint_slot(each) for each in versions]
        facts |= {"tokens_by_policy_version": ages or None, "text": "\n".join(turns)}
        graph.add("rollout", name, [shard, *policies_of], **facts)
        digest = digests.get(shard.rpartition("/")[2])
        graph.add("shard", shard, [sealed.slot], sha256=digest, url=run.store.url_of(shard))
        for policy in policies_of:
            if policy not in policies:  # most rollouts of a round have the same one
                policies.add(policy)
                _add_slot(graph, sealed, [parent.slot for parent in sealed.parents])
                add_policy(graph, run, policy)


def _tokens_by_version(row: Facts, round: int) -> dict[str, str]:
    """Sampled tokens of a rollout by the policy that drew them, with its age in rounds."""
    if (versions := row.get("policy_versions")) is None:
        return {}
    sampled = zip(versions, row["loss_mask"], strict=True)
    counts = Counter(version for version, on in sampled if on)
    return {
        str(version): f"{count} tokens, {round - version} rounds old"
        for version, count in sorted(counts.items())
    }


def add_policy(graph: Lineage, run: Run, slot: str) -> None:
    owner = run.owner_of(slot)
    checkpoint = read_manifest(run.store, slot)
    if checkpoint is not None:
        adapts = "base_digest" in checkpoint[0].extra
        _add_slot(graph, checkpoint[0], [*([layout.base_slot()] if adapts else []), owner])
        if adapts:
            _add_slot(graph, committed_manifest(run.store, layout.base_slot()), [owner])
    own = owner == run.run_id
    _add_run(graph, run if own else Run.open(run.config.root, owner, run.config.storage_options))


def _add_run(graph: Lineage, run: Run) -> None:
    record = read_record(run.folder)
    assert record is not None, "an opened run has its record"
    graph.add(
        "run",
        run.run_id,
        url=run.folder.url_of(RUN_KEY),
        sha256=sha256_of(run.folder.read(RUN_KEY)),
        config_digest=record["content_digest"],
        seed=record["seeds"]["run"],
        code=" ".join(f"{name} {value}" for name, value in sorted(record["code"].items())),
    )
