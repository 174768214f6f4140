"""Round of a run for a page: its mean reward, and the rollouts that are shown of it.

Read through the verifying readers: a page never shows a row whose file differs from its manifest.
Light columns are read of all rollouts, tokens only of the row groups that hold a picked one.

Few rollouts are shown, and the same of the same files. Of a round these groups are taken: the one
whose rewards differ most, the one with the lowest mean, the one with the highest, then others in
their order. Of a group: its best, its worst, then others in their order.

Texts of tokens never split a character: a token whose bytes are only a part of one reads as
nothing, and the token that completes it as the whole. Without the tokenizer, tokens are shown by
their ids.
"""

import codecs
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import polars as pl

from marin_rl.analysis.dialogues import calls_of, dialogue_of, is_sampled
from marin_rl.config import PolicyConfig
from marin_rl.errors import InputError, ObjectMissing
from marin_rl.pages.records import Fate, GroupCard, Number, Tokens
from marin_rl.rollouts.estimates import Estimate, estimate_of_groups
from marin_rl.storage.commits import read_manifest
from marin_rl.storage.layout import SCORES_PREFIX
from marin_rl.storage.runs import Run, checkpoint_slot
from marin_rl.storage.tables.batches import read_dispositions
from marin_rl.storage.tables.parquet import TableReader, open_part, select
from marin_rl.storage.tables.rollouts import rollouts_manifest
from schemas.migrations import ROLLOUTS as LADDER
from schemas.migrations import SCORES as SCORES_LADDER
from schemas.tables import ROLLOUTS, SCORES

LIGHT = ("rollout_id", "group_id", "index_in_group", "reward", "status")
LEFT_OUT = ("run_id", "messages", "attempt", "replica")
SCORE_COLUMNS = ("rollout_id", "positions", "trainer_logprobs", "entropies", "clipped")
BEST, WORST = "best", "worst"
DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Amount of a round that is shown: groups, members of each, tokens and characters of each."""

    groups: int = 4
    members: int = 4
    tokens: int = 512
    characters: int = 4000


class TokenTexts:
    """Texts of a run's tokens; `digest` is that of the tokenizer, empty without one."""

    def __init__(self, policy: PolicyConfig) -> None:
        from marin_rl.serving.text.detokenizer import Detokenizer
        from marin_rl.tokenizers import tokenizer_digest, tokenizer_for

        self.digest, self.problem = "", ""
        self._texts: Detokenizer | None = None
        try:
            tokenizer = tokenizer_for(policy)
        except InputError as error:
            self.problem = str(error)
            return
        self.digest = tokenizer_digest(tokenizer)
        self._texts = Detokenizer(tokenizer)

    def of(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; special tokens by their names."""
        if self._texts is None:
            return [f"⟨{token}⟩" for token in ids]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = []
        for token in ids:
            piece = self._texts.piece(token)
            text = self._texts.name(token) if piece.special else decoder.decode(bytes(piece.data))
            texts.append(text)
        return texts


# The trainer's log-probability, entropy and clipping by position in the rollout.
Scores = Mapping[int, tuple[float, float, bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPart:
    """Records that one sealed round adds to a page; `reward` is the mean of all its rollouts'."""

    round: int
    rollouts: int
    reward: Estimate | None
    groups: Sequence[GroupCard]
    tokenizer_digest: str


@dataclass(frozen=True, slots=True)
class Member:
    """A rollout to pick from; `reward` is None where it has no usable one."""

    rollout_id: str
    index: int
    reward: float | None


class Pick(NamedTuple):
    """A group that is shown, the reason, and its shown members by id, with their place in it."""

    group_id: str
    why: str
    members: Mapping[str, str]


def read_round(run: Run, round: int, amount: Amount, texts: TokenTexts) -> RoundPart:
    """A sealed round; `amount.groups` 0 reads no tokens."""
    manifest = rollouts_manifest(run, round)
    shards = {
        part.name: open_part(run.store, manifest.slot, part, LADDER) for part in manifest.parts
    }
    light = pl.concat(
        [pl.DataFrame(shard.table(select(ROLLOUTS, LIGHT))) for shard in shards.values()]
    )
    members: dict[str, list[Member]] = {}
    for name, group, index, reward, status in light.rows():
        usable = reward is not None and math.isfinite(reward) and status not in ("error", "aborted")
        member = Member(name, index, reward if usable else None)
        members.setdefault(group, []).append(member)
    valid = [[m.reward for m in group if m.reward is not None] for group in members.values()]
    picks = pick(members, amount.groups, amount.members)
    rows = _picked_rows(shards, picks) if picks else {}
    fates, scores = _fates(run, round, rows), _scores(run, round, rows)
    cards: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        tokens = tokens_of(row, scores.get(name), texts, amount.tokens)
        cards[name] = _card(row, fates.get(name, Fate()), tokens, amount.characters)
    return RoundPart(
        round=round,
        rollouts=light.height,
        reward=estimate_of_groups(valid),
        groups=[
            _group(one, members[one.group_id], rows, cards, amount.characters) for one in picks
        ],
        tokenizer_digest=next((row["tokenizer_digest"] for row in rows.values()), ""),
    )


def _picked_rows(
    shards: Mapping[str, TableReader], picks: Sequence[Pick]
) -> dict[str, dict[str, Any]]:
    """Rows of the picked rollouts, each with the name of its shard as `file`."""
    wanted = {name for one in picks for name in one.members}
    names = [name for name in ROLLOUTS.names if name not in LEFT_OUT]
    rows: dict[str, dict[str, Any]] = {}
    for file, shard in shards.items():
        for index in range(shard.row_groups):
            ids = shard.group(index, select(ROLLOUTS, ["rollout_id"]))["rollout_id"]
            if wanted.isdisjoint(ids.to_pylist()):
                continue
            frame = pl.DataFrame(shard.group(index, select(ROLLOUTS, names)))
            for row in frame.filter(pl.col("rollout_id").is_in(list(wanted))).iter_rows(named=True):
                rows[row["rollout_id"]] = row | {"file": file}
    return rows


def _fates(run: Run, round: int, rows: Mapping[str, Any]) -> dict[str, Fate]:
    """By the round's own batches, or by those of later rounds where generation runs ahead."""
    fates: dict[str, Fate] = {}
    for decided in range(round, round + run.config.staleness_rounds_max + 1):
        if len(fates) == len(rows):
            break
        try:
            frame = pl.DataFrame(read_dispositions(run, decided))
        except ObjectMissing:
            continue
        new = [name for name in rows if name not in fates]
        for row in frame.filter(pl.col("rollout_id").is_in(new)).iter_rows(named=True):
            fates[row["rollout_id"]] = Fate(
                kind=row["disposition"],
                reason=row["reason"] or "",
                round=decided,
                step=row["step"],
                row=row["row"],
                segment=row["segment"],
                advantage=row["advantage"],
            )
    return fates


def _scores(run: Run, round: int, rows: Mapping[str, Any]) -> dict[str, Scores | None]:
    """Trainer's scores of the picked rollouts; None for one that was trained on in several pieces.

    Positions of a piece are its own.
    """
    scores: dict[str, Scores | None] = {}
    for trained in range(round, round + run.config.staleness_rounds_max + 1):
        here: dict[str, Scores | None] = {}
        for row in _score_rows(run, trained, list(rows)) if rows else ():
            name = row["rollout_id"]
            columns = (row[column] for column in SCORE_COLUMNS[2:])
            own = dict(zip(row["positions"], zip(*columns, strict=True), strict=True))
            here[name] = None if name in here else own
        scores = here | scores  # of the first round that trained on it
    return scores


def _score_rows(run: Run, trained: int, names: list[str]) -> Iterator[dict[str, Any]]:
    sealed = read_manifest(run.store, checkpoint_slot(trained + 1))
    if sealed is None:
        return
    manifest = sealed[0]
    for part in manifest.parts:
        if part.name.startswith(SCORES_PREFIX):
            reader = open_part(run.store, manifest.slot, part, SCORES_LADDER)
            frame = pl.DataFrame(reader.table(select(SCORES, SCORE_COLUMNS)))
            yield from frame.filter(pl.col("rollout_id").is_in(names)).iter_rows(named=True)


def _group(
    picked: Pick,
    members: Sequence[Member],
    rows: Mapping[str, dict[str, Any]],
    cards: Mapping[str, dict[str, Any]],
    characters: int,
) -> GroupCard:
    first = rows[next(iter(picked.members))]
    rewards = [member.reward for member in members]
    valid = [reward for reward in rewards if reward is not None]
    sampling = {k: v for k, v in first["sampling"].items() if k != "seed" and v not in (None, [])}
    return GroupCard(
        id=picked.group_id,
        round=first["round"],
        environment=first["environment"],
        example=first["example_id"],
        answer=(first["answer"] or "")[:characters],
        metadata=first["metadata"][:characters],
        sampling=json.dumps(sampling),
        why=picked.why,
        size=first["group_size"],
        rewards=rewards,
        mean=math.fsum(valid) / len(valid) if valid else None,
        cards=[cards[name] | {"place": place} for name, place in picked.members.items()],
    )


def _card(row: Mapping[str, Any], fate: Fate, tokens: Tokens, characters: int) -> dict[str, Any]:
    turns = []
    for turn in row["turns"]:
        shown = {
            "content": turn["content"][:characters],
            "left_out": max(0, len(turn["content"]) - characters),
            "tool_calls": [{**c, "arguments": c["arguments"][:characters]} for c in calls_of(turn)],
            "sampled": is_sampled(turn),
        }
        turns.append(turn | shown)
    card = dialogue_of({**row, "turns": turns}) | {
        "index": row["index_in_group"],
        "error": (row["error"] or "")[:characters],
        "policy_digest": row["policy_digest"],
        "model": row["model"],
        "shard": row["file"],
        "fate": fate,
        "tokens": tokens,
    }
    del card["prompt"], card["completion"], card["answer"]  # its turns, and its group, have them
    return card


def pick(groups: Mapping[str, Sequence[Member]], n_groups: int, n_members: int) -> list[Pick]:
    """Pick at most `n_groups` groups of at most `n_members` members, the most telling first."""
    chosen: dict[str, str] = {}
    rewards = {
        name: [member.reward for member in members if member.reward is not None]
        for name, members in groups.items()
    }
    means = {name: math.fsum(values) / len(values) for name, values in rewards.items() if values}
    spreads = {name: max(rewards[name]) - min(rewards[name]) for name in means}
    if spreads and max(spreads.values()) > 0:
        chosen[max(spreads, key=spreads.__getitem__)] = "rewards differ most"
    if means:
        chosen.setdefault(min(means, key=means.__getitem__), "lowest mean reward")
        chosen.setdefault(max(means, key=means.__getitem__), "highest mean reward")
    for name in groups:
        chosen.setdefault(name, "next in order")
    return [
        Pick(name, why, pick_members(groups[name], n_members))
        for name, why in islice(chosen.items(), n_groups)
    ]


def pick_members(members: Sequence[Member], n_members: int) -> dict[str, str]:
    """The ids of the shown members in their order, each with its place: best, worst or none.

    Where all rewards are equal, none is best or worst.
    """
    places: dict[str, str] = {}
    valid = [member for member in members if member.reward is not None]
    if valid:
        best = max(valid, key=lambda member: (member.reward or 0.0, -member.index))
        worst = min(valid, key=lambda member: (member.reward or 0.0, -member.index))
        if best.reward != worst.reward:
            places = {best.rollout_id: BEST, worst.rollout_id: WORST}
    for member in members:
        places.setdefault(member.rollout_id, "")
    kept = dict(islice(places.items(), n_members))
    return {m.rollout_id: kept[m.rollout_id] for m in members if m.rollout_id in kept}


def tokens_of(
    row: Mapping[str, Any], scores: Scores | None, texts: TokenTexts, tokens_max: int
) -> Tokens:
    """The last `tokens_max` tokens of a rollout: the end of a completion decides most rewards."""
    ids, trained, sampler = row["token_ids"], row["loss_mask"], row["logprobs"]
    start = max(0, len(ids) - tokens_max)
    places = range(start, len(ids))
    known = [scores.get(place, (None, None, False)) for place in places] if scores else None
    return Tokens(
        left_out=start,
        ids=ids[start:],
        texts=texts.of(ids[start:]),
        trained=trained[start:],
        sampler=[_short(sampler[p]) if trained[p] else None for p in places],
        trainer=None if known is None else [_short(logprob) for logprob, _, _ in known],
        entropies=None if known is None else [_short(entropy) for _, entropy, _ in known],
        clipped=None if known is None else [int(clipped) for _, _, clipped in known],
    )


def _short(value: Number) -> Number:
    return None if value is None else round(value, DIGITS)
