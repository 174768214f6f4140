"""A page shows what is committed, and no text of a run can become a part of it."""

import hashlib
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.run_factories import (
    FINGERPRINT,
    HOSTILE,
    ROUNDS,
    add_round,
    commit_round,
    configuration,
    dialogue_run,
    group,
    policy,
    shown_run,
    whole_run,
)

from marin_rl.display.tables import evenly
from marin_rl.errors import CorruptObject
from marin_rl.pages import document
from marin_rl.pages.document import Choice, RunPage, report_html, scripts, without_secrets
from marin_rl.pages.records import Page
from marin_rl.pages.rounds import Member, pick, pick_members
from marin_rl.storage.commits import commit_manifest, new_attempt, new_manifest
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables.rollouts import commit_shard
from marin_rl.storage.upkeep.forks import fork_run
from schemas.manifests import Part


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return shown_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page(run: Run) -> Page:
    return RunPage(run).page()


def test_a_dialogue_is_shown_turn_by_turn_with_the_places_of_its_tokens(tmp_path: Path) -> None:
    page = RunPage(dialogue_run(tmp_path)).page()
    cards = {card["rollout_id"]: card for group in page.groups for card in group.cards}
    searched = cards["round-00000/group-00000/000"]
    assert (searched["n_turns"], searched["tools"]) == (2, ["search", "weigh"])
    turns = searched["turns"]
    assert [call["name"] for call in turns[1]["tool_calls"]] == ["search", "weigh"]
    assert [bool(turn["cut"]) for turn in turns] == [False, False, True, False]
    assert (turns[1]["model_s"], turns[1]["environment_s"]) == (1.75, 3.25)
    assert [turn["sampled"] for turn in turns] == [False, True, False, True]
    assert [turn["reward"] for turn in turns] == [None, 0.25, None, 0.5]
    assert (turns[2]["tool_name"], turns[2]["tool_call_id"]) == ("search", "call-1")
    for turn in turns:
        if turn["sampled"]:
            assert all(searched["tokens"].trained[turn["start"] : turn["end"]])
            assert turn["finish_reason"] == "stop"
    timing = searched["timing"]
    assert (timing["decode_s"], timing["environment_s"]) == (0.25, 3.25)
    assert cards["round-00000/group-00001/000"]["n_turns"] == 1


def test_answers_of_the_first_and_of_the_latest_evaluation_stand_side_by_side(tmp_path: Path):
    compared = RunPage(whole_run(str(tmp_path), rounds=3, evaluated={0, 2})).page().held_out
    assert compared is not None
    assert compared.rounds == (0, 2)
    for _, before, after in compared.pairs:
        assert [sampled for sampled, _ in before.turns] == [False, True]
        assert before.turns[0] == after.turns[0], "both answer the same prompt"
    assert (
        RunPage(whole_run(str(tmp_path / "one"), rounds=1, evaluated={0})).page().held_out is None
    )


class Elements(HTMLParser):
    """Counts what a browser would take for elements, and keeps the data."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.data = ""
        self._in_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.sources += [value for name, value in attrs if name in ("src", "href") and value]
        self._in_data = found.get("id") == "data"

    def handle_data(self, data: str) -> None:
        if self._in_data:
            self.data += data

    def handle_endtag(self, tag: str) -> None:
        self._in_data = False


def parsed(html: str) -> Elements:
    elements = Elements()
    elements.feed(html)
    elements.close()
    return elements


def test_a_page_is_self_contained_and_its_texts_are_only_text(page: Page) -> None:
    html = report_html(page)
    elements = parsed(html)
    assert elements.tags.count("script") == len(scripts()) + 1  # and the data
    assert {"img", "svg", "b"} & set(elements.tags) == set()
    assert all(source.startswith(("#", "data:")) for source in elements.sources)
    assert "<title>shown ·" in html
    data = json.loads(elements.data)
    contents = {
        turn["content"]
        for found in data["groups"]
        for card in found["cards"]
        for turn in card["turns"]
    }
    assert set(HOSTILE) <= contents
    for script in scripts():
        assert script.hash in html


def test_scripts_cannot_end_their_own_element() -> None:
    for script in scripts():
        assert "</script" not in script.text.lower()
        assert "<!--" not in script.text


def test_cards_tell_reward_fate_tokens_and_place(page: Page) -> None:
    (first,) = [found for found in page.groups if found.id == "round-00001/group-00000"]
    assert (first.why, first.round, first.rewards) == ("rewards differ most", 1, [0.0, 1.0, 0.25])
    assert math.isclose(first.mean or 0.0, 1.25 / 3)
    worst, best, third = first.cards
    assert [card["place"] for card in first.cards] == ["worst", "best", ""]
    fate = best["fate"]
    assert (best["reward"], fate.kind, fate.round) == (1.0, "consumed", 1)
    assert fate.advantage == pytest.approx(1.0 - 0.25 / 2)
    assert (best["shard"], best["policy_version_min"]) == ("shard-0000.parquet", 1)
    (component,) = best["reward_components"]
    assert (component["name"], component["value"]) == ("<b>correct</b>", 1.0)
    tokens = worst["tokens"]
    assert "".join(tokens.texts[3:-1]) == HOSTILE[0]
    assert tokens.texts[-1] == "<|end|>"
    assert tokens.sampler[:5] == [None, None, None, -0.5, -1.0]
    assert tokens.trained[:5] == [0, 0, 0, 1, 1]
    assert tokens.trainer is None
    assert third["index"] == 2


def test_failed_rollouts_and_groups_without_signal_are_shown_too(page: Page) -> None:
    cards = {card["rollout_id"]: card for found in page.groups for card in found.cards}
    assert cards["round-00000/group-00002/001"]["error"] == "it broke"
    assert cards["round-00000/group-00002/001"]["fate"].kind == "failed"
    assert cards["round-00000/group-00001/000"]["fate"].kind == "filtered"
    assert f"Shown: {7 * ROUNDS} of {7 * ROUNDS} rollouts, from every round" in page.notes[0]


def test_digests_are_those_of_the_manifests(run: Run, page: Page) -> None:
    found = page.slots
    slot = found["rollouts/round-00002"]
    path = run.store.local_path("rollouts/round-00002/manifest.json")
    assert path is not None
    assert slot.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    shard = path.with_name("shard-0000.parquet")
    assert slot.parts == [(shard.name, hashlib.sha256(shard.read_bytes()).hexdigest())]
    assert found["batches/round-00002"].parents == [("rollouts/round-00002", slot.sha256)]


def test_a_round_names_its_slots_and_a_slot_is_there_once(page: Page) -> None:
    first, second, _ = page.rounds
    assert first.slots[-1] == ("policy after training", "checkpoints/round-00001")
    assert second.slots[0] == ("policy that sampled", "checkpoints/round-00001")
    assert set(page.slots) == {name for item in page.rounds for _, name in item.slots}
    assert len(page.slots) == 3 * ROUNDS + 1  # rollouts, batches, a checkpoint, and the first one


def test_every_shard_has_its_digest_and_arrays_are_counted(tmp_path: Path) -> None:
    """A checkpoint may have thousands of files, which its manifest's digest covers."""
    run = Run.create_or_open(configuration(str(tmp_path), shards=20, groups=20))
    parts = [Part(name=f"d/{number}", bytes=1, sha256="0" * 64) for number in range(20)]
    slot = checkpoint_slot(0)
    commit_manifest(
        run.store, new_manifest(slot, attempt=new_attempt(), fingerprint=FINGERPRINT, parts=parts)
    )
    commit_round(run, 0, [[group(f"g{number}", [0.0, 1.0])] for number in range(20)])
    page = RunPage(run, Choice(groups_per_round=20)).page()
    shards = dict(page.slots["rollouts/round-00000"].parts)
    assert len(shards) == 20
    assert {card["shard"] for found in page.groups for card in found.cards} == set(shards)
    checkpoint = page.slots[slot]
    assert (len(checkpoint.parts), checkpoint.n_parts) == (16, 20)


def test_a_shared_round_is_of_the_configuration_that_played_it(tmp_path: Path) -> None:
    parent = whole_run(str(tmp_path), 2, shards=1)
    fork = fork_run(parent, 1, "fork", ["objective.advantage=grpo"])
    facts = RunPage(fork).page().facts
    recorded = json.loads((tmp_path / "run" / "run.json").read_bytes())["content_digest"]
    assert facts.shared == [("run", 1, recorded)]
    assert facts.content_digest != recorded
    assert RunPage(parent).page().facts.shared == []


def test_curves_are_over_all_rollouts_of_committed_rounds(page: Page) -> None:
    charts = {chart.key: chart for chart in page.charts}
    training = charts["reward"].lines[0]
    mean = (0.0 + 1.0 + 0.25 + 0.5 + 0.5 + 1.0) / 6
    assert (training.name, list(training.x)) == ("training reward", [0, 1, 2])
    assert training.y == pytest.approx([mean] * 3)
    assert charts["entropy"].lines[0].y == pytest.approx([1.0, 0.5, 1 / 3])
    assert "KL" in page.absent


def test_a_page_follows_a_run_and_reads_what_is_old_once(tmp_path, monkeypatch):
    run = shown_run(tmp_path, rounds=4)
    read: list[int] = []

    def counted(*arguments: Any) -> Any:
        read.append(arguments[1])
        return original(*arguments)

    original = document.read_round
    monkeypatch.setattr(document, "read_round", counted)
    pages = RunPage(run)
    assert len(pages.page().rounds) == 4
    add_round(run, 4)
    commit_shard(run, 5, 0, [group("open", [1.0])], FINGERPRINT, policy(5))
    later = pages.page()
    assert [item.round for item in later.rounds] == [0, 1, 2, 3, 4]
    assert read == [0, 1, 2, 3, 4]
    assert (later.stage, later.ended) == ("generating round 5 (1 of 1)", False)


def test_a_batch_that_comes_later_is_shown_when_it_is_there(tmp_path: Path) -> None:
    run = shown_run(tmp_path, rounds=1)
    pages = RunPage(run)
    commit_round(run, 1, [[group("late", [0.0, 1.0])]])
    card = next(g for g in pages.page().groups if g.id == "late").cards[0]
    assert (card["fate"].kind, card["fate"].round) == ("undecided", None)


def test_many_rounds_give_way_and_the_page_says_so(tmp_path: Path) -> None:
    run = shown_run(tmp_path, rounds=5)
    choice = Choice(groups_per_round=1, members_per_group=2, rollouts_max=6)
    page = RunPage(run, choice).page()
    assert [found.round for found in page.groups] == [0, 2, 4]
    assert [item.round for item in page.rounds] == [0, 2, 4]
    assert "rollouts/round-00001" not in page.slots
    assert "Shown: 6 of 35 rollouts, from 3 of 5 rounds" in page.notes[0]
    assert list(page.charts[0].lines[0].x) == [0, 1, 2, 3, 4]


def test_an_altered_shard_is_refused_not_shown(tmp_path: Path) -> None:
    run = shown_run(tmp_path, rounds=1)
    path = run.store.local_path("rollouts/round-00000/shard-0000.parquet")
    assert path is not None
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptObject, match=r"shard-0000\.parquet: expected SHA-256"):
        RunPage(run).page()


def test_a_run_without_anything_has_a_page(tmp_path: Path) -> None:
    page = RunPage(Run.create_or_open(configuration(str(tmp_path)))).page()
    data = json.loads(orjson.dumps(page))
    assert (data["facts"]["run_id"], data["groups"], data["charts"]) == ("run", [], [])
    assert "application/json" in report_html(page)


def test_secrets_of_storage_are_not_shown() -> None:
    options = {"project": "p", "secret": "hush", "client_kwargs": {"aws_session_token": "hush"}}
    assert without_secrets(options) == {
        "project": "p",
        "secret": "(not shown)",
        "client_kwargs": {"aws_session_token": "(not shown)"},
    }


def members(name: str, *rewards: float | None) -> list[Member]:
    return [
        Member(rollout_id=f"{name}{index}", index=index, reward=reward)
        for index, reward in enumerate(rewards)
    ]


def test_the_widest_then_the_lowest_then_the_highest_group() -> None:
    groups = {
        "a": members("a", 0.4, 0.6),
        "b": members("b", 0.0, 0.1),
        "c": members("c", 0.0, 1.0),
        "d": members("d", 0.9, 1.0),
        "e": members("e", None, None),
    }
    found = [(one.group_id, one.why) for one in pick(groups, 4, 2)]
    assert found == [
        ("c", "rewards differ most"),
        ("b", "lowest mean reward"),
        ("d", "highest mean reward"),
        ("a", "next in order"),
    ]
    assert len(pick(groups, 99, 2)) == 5
    assert pick(groups, 0, 2) == []


def test_best_and_worst_come_before_others_and_stay_in_order() -> None:
    group = members("g", 0.5, 1.0, None, 0.0, 1.0)
    assert pick_members(group, 3) == {"g0": "", "g1": "best", "g3": "worst"}
    assert pick_members(group, 2) == {"g1": "best", "g3": "worst"}


def test_of_equal_rewards_none_is_best_or_worst() -> None:
    assert pick_members(members("g", 1.0, 1.0, 1.0), 2) == {"g0": "", "g1": ""}
    assert pick_members(members("g", 1.0), 2) == {"g0": ""}
    assert pick_members(members("g", None, None), 1) == {"g0": ""}


def test_rounds_are_spread_evenly_with_both_ends() -> None:
    assert evenly(range(5), 9) == [0, 1, 2, 3, 4]
    assert evenly(range(9), 3) == [0, 4, 8]
    assert evenly(range(9), 1) == [8]
    assert evenly([], 3) == []
