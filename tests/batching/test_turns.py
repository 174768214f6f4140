"""Rewards by turn: returns and advantages by hand, in every kind of row, critic or not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from support.run_factories import commit_round, configuration, group_of, rollout

from marin_rl.batching.advantages import rewards_of
from marin_rl.batching.build import build_round
from marin_rl.batching.turns import Turns, with_turns
from marin_rl.config import parse_config
from marin_rl.errors import ConfigError
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.batches import read_batches
from marin_rl.types import Rollout, TrainingBatch, Turn

VALUES = np.array([0.5, -0.25, 1.0, 0.75])  # of the trained tokens of `talk`, in order
TALK = [3.0, 3.0, 2.0, 2.0]  # 1 for the first answer, 2 for the second


def talk(name: str, index: int = 0, first: float = 1.0, **options: Any) -> Rollout:
    """Question, answer (2 tokens, worth `first`), a tool's word (2 tokens), answer (2 tokens)."""
    whole = rollout(name, index=index, prompt=[5, 6], completion=[7, 8, 20, 21, 9, 10], **options)
    turns = (
        Turn(role="user", content="q", start=0, end=2),
        Turn(role="assistant", content="a", start=2, end=4, reward=first),
        Turn(role="tool", content="t", start=4, end=6),
        Turn(role="assistant", content="b", start=6, end=8, reward=options["reward"] - first),
    )
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int32)
    return replace(
        whole, turns=turns, loss_mask=mask, logprobs=whole.logprobs * (mask == 1).astype(np.float32)
    )


def built(root: Path, rollouts: list[Rollout], **sections: Any) -> TrainingBatch:
    critic = {"advantage": "gae", "ratio_level": "token", **sections.pop("objective", {})}
    sections["rollouts"] = {"group_size_min": 1}
    config = configuration(
        str(root), objective=critic, training={"critic": {}}, groups=1, **sections
    )
    run = Run.create_or_open(config)
    (batch,) = read_batches(
        run, build_round(run, 0, commit_round(run, 0, [[group_of("g", rollouts)]]))
    )
    return batch


ROWS = {
    "one": {},
    "several": {"batching": {"packing": "sequences", "row_tokens": 128}},
    "one prompt": {"batching": {"packing": "shared_prompt", "row_tokens": 128}},
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_reward_is_received_at_the_end_of_its_turn(tmp_path: Path, rows) -> None:
    single = rollout("g/1", index=1, reward=0.5, prompt=[5, 6], completion=[4, 3])
    batch = built(tmp_path, [talk("g/0", reward=3.0), single], **rows)
    mask = batch.loss_mask == 1
    assert_allclose(batch.returns[mask], [*TALK, 0.5, 0.5])
    assert not batch.returns[~mask].any()
    assert_allclose(
        rewards_of(batch.returns[mask].astype(np.float64), np.array([0] * 4 + [1] * 2)),
        [0.0, 1.0, 0.0, 2.0, 0.0, 0.5],
    )


def test_without_a_critic_each_token_has_the_whole_reward(tmp_path: Path) -> None:
    """As docs/on-disk-format.md says: returns by token are for what reads them."""
    members = [talk("g/0", reward=3.0), talk("g/1", index=1, first=0.5, reward=1.0)]
    run = Run.create_or_open(configuration(str(tmp_path), groups=1))
    ref = build_round(run, 0, commit_round(run, 0, [[group_of("g", members)]]))
    (batch,) = read_batches(run, ref)
    assert_allclose(batch.returns[batch.loss_mask == 1], [3.0] * 4 + [1.0] * 4)


def test_the_length_penalty_is_received_last(tmp_path: Path) -> None:
    penalty = {"overlong": "soft_penalty", "overlong_buffer": 1.0, "overlong_penalty": 8.0}
    sampling = {"max_tokens": 8}
    batch = built(tmp_path, [talk("g/0", reward=3.0)], objective=penalty, sampling=sampling)
    # six of eight tokens cost 6
    assert_allclose(batch.returns[batch.loss_mask == 1], [-3.0, -3.0, -4.0, -4.0])


def turned(root: Path, groups: list[list[Rollout]], **sections: Any) -> tuple[TrainingBatch, ...]:
    """The batches of rollouts whose advantages are those of their turns."""
    chosen = {"ratio_level": "token", **sections.pop("objective", {})}
    config = configuration(str(root), objective=chosen, groups=len(groups), **sections)
    run = Run.create_or_open(config)
    made = [group_of(f"g{place}", rollouts) for place, rollouts in enumerate(groups)]
    return tuple(read_batches(run, build_round(run, 0, commit_round(run, 0, [made]))))


def of_each(batches: tuple[TrainingBatch, ...], name: str) -> dict[str, list[float]]:
    """A batch's advantages, or returns, of the trained tokens of every rollout."""
    found = {}
    for batch in batches:
        for row, names in enumerate(batch.rollout_ids):
            for segment, rollout_id in enumerate(names, start=1):
                here = (batch.segment_ids[row] == segment) & (batch.loss_mask[row] == 1)
                found[rollout_id] = getattr(batch, name)[row][here].tolist()
    return found


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_turns_are_compared_with_those_of_their_place(tmp_path: Path, rows) -> None:
    short = rollout("g0/2", index=2, reward=0.5, prompt=[5, 6], completion=[4, 3])
    group = [talk("g0/0", reward=3.0), talk("g0/1", index=1, reward=1.0), short]
    batches = turned(tmp_path, [group], objective={"turn_discount": 0.5}, **rows)
    # returns: 1 + 2/2 and 2; 1 + 0/2 and 0; 0.5. Each less the mean of the others of its place.
    assert of_each(batches, "advantages") == {
        "g0/0": [1.25, 1.25, 2.0, 2.0],
        "g0/1": [-0.25, -0.25, -2.0, -2.0],
        "g0/2": [-1.0, -1.0],
    }


def test_turns_that_differ_are_a_signal_where_sums_do_not(tmp_path: Path) -> None:
    group = [talk("g0/0", reward=3.0), talk("g0/1", index=1, first=2.0, reward=3.0)]
    assert turned(tmp_path / "sums", [group]) == ()
    discounted = {"turn_discount": 1.0, "advantage": "dr_grpo"}
    batches = turned(tmp_path / "turns", [group], objective=discounted)
    # 3 and 3 are to come at first, 2 and 1 later
    assert of_each(batches, "advantages") == {
        "g0/0": [0.0, 0.0, 0.5, 0.5],
        "g0/1": [0.0, 0.0, -0.5, -0.5],
    }


def test_the_length_penalty_belongs_to_the_last_turn(tmp_path: Path) -> None:
    group = [talk("g0/0", reward=3.0), talk("g0/1", index=1, reward=1.0)]
    objective = {
        "turn_discount": 0.0, "advantage": "reinforce", "overlong": "soft_penalty",
        "overlong_buffer": 1.0, "overlong_penalty": 8.0,
    }  # fmt: skip
    batches = turned(tmp_path, [group], objective=objective, sampling={"max_tokens": 8})
    # six of eight tokens cost 6; a discount of 0 leaves each turn its own
    assert of_each(batches, "advantages") == {
        "g0/0": [1.0, 1.0, -4.0, -4.0],
        "g0/1": [1.0, 1.0, -6.0, -6.0],
    }


@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std", "token_whitening"])
def test_one_turn_is_worth_what_its_rollout_is(tmp_path: Path, scale: str) -> None:
    groups = [
        [
            rollout(f"g{p}/{i}", index=i, reward=r, completion=[4] * (i + 1))
            for i, r in enumerate(rs)
        ]
        for p, rs in enumerate([[1.0, 0.0, None], [0.25, 3.0, 1.0]])
    ]
    plain, by_turn = (
        turned(tmp_path / name, groups, objective={"advantage_scale": scale, **discount})
        for name, discount in {"plain": {}, "turns": {"turn_discount": 0.5}}.items()
    )
    assert of_each(plain, "advantages") == of_each(by_turn, "advantages")


@pytest.mark.parametrize("discount", [{}, {"turn_discount": 0.9}], ids=["rollouts", "turns"])
def test_whitening_counts_trained_tokens_alone(tmp_path: Path, discount: dict[str, float]) -> None:
    single = rollout("g0/1", index=1, reward=0.5, prompt=[5, 6], completion=[4, 3])
    objective = {"advantage": "dr_grpo", "advantage_scale": "token_whitening", **discount}
    (batch,) = turned(tmp_path, [[talk("g0/0", reward=3.0), single]], objective=objective)
    trained = batch.advantages[batch.loss_mask == 1]
    assert_allclose([trained.mean(), trained.std(ddof=1)], [0.0, 1.0], atol=1e-6)
    assert not batch.advantages[batch.loss_mask == 0].any()


def test_dispositions_have_the_mean_over_a_rollouts_tokens(tmp_path: Path) -> None:
    group = [talk("g0/0", reward=3.0), talk("g0/1", index=1, reward=1.0)]
    turned(tmp_path, [group], objective={"turn_discount": 0.5})
    (table,) = (pq.read_table(path) for path in tmp_path.rglob("dispositions*.parquet"))
    # returns 2, 2 and 1, 0: advantages 1 and 2, -1 and -2, two tokens each
    assert table["advantage"].to_pylist() == [1.5, -1.5]


@pytest.mark.parametrize(
    ("objective", "found"),
    [
        ({"ratio_level": "sequence"}, "ratio_level token, found sequence"),
        ({"advantage": "pass_at_k"}, "no meaning with advantage pass_at_k"),
        ({"kl_placement": "reward", "kl_coefficient": 0.1}, "kl_placement loss: found reward"),
    ],
)
def test_settings_incompatible_with_turns_are_refused(objective, found):
    chosen = {"ratio_level": "token", "turn_discount": 1.0, **objective}
    with pytest.raises(ConfigError, match=found):
        parse_config({"objective": chosen})


Spans = list[tuple[int, float | None]]  # where a turn ends, and its reward


@st.composite
def masked_rollouts(draw: st.DrawFn) -> tuple[list[list[int]], list[Spans], list[float]]:
    """Loss masks, turns and rewards of a few rollouts, without rhyme or reason."""
    masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=1, max_size=4))
    quarters = st.integers(-8, 8).map(lambda q: q / 4)
    spans = [
        sorted(
            draw(
                st.lists(
                    st.tuples(st.integers(1, max(len(m), 1)), st.none() | quarters), max_size=3
                )
            ),
            key=lambda span: span[0],
        )
        for m in masks
    ]
    return masks, spans, draw(st.lists(quarters, min_size=len(masks), max_size=len(masks)))


def token_by_token(mask: list[int], spans: Spans, reward: float, discount: float) -> list[float]:
    """Return of each trained token's turn, by walking over the tokens."""
    early = [(end - 1, r) for end, r in spans if r is not None and end < len(mask)]
    turns: list[float] = []
    of_token, on = [], False
    for place, trained in enumerate(mask):
        if trained and not on:
            turns.append(0.0)
        if trained:
            of_token.append(len(turns) - 1)
        on = bool(trained) and place not in [at for at, _ in early]
        if turns:
            turns[-1] += sum(r for at, r in early if at == place)
    if turns:
        turns[-1] += reward - sum(r for _, r in early)
    for place in reversed(range(len(turns) - 1)):
        turns[place] += discount * turns[place + 1]
    return [turns[place] for place in of_token]


@given(masked_rollouts(), st.sampled_from([0.0, 0.5, 1.0]))
def test_turns_equal_those_of_a_walk_over_tokens(rollouts, discount: float) -> None:
    masks, spans, rewards = rollouts
    told = [[{"end": end, "reward": r} for end, r in spans_of] for spans_of in spans]
    shape = pa.list_(pa.struct([("end", pa.int32()), ("reward", pa.float64())]))
    table = pa.table(
        {"loss_mask": pa.array(masks, pa.list_(pa.int32())), "turns": pa.array(told, shape)}
    )
    turns = Turns.of(with_turns(table))
    return_U = turns.returns(np.array(rewards), discount)
    found = np.split(np.repeat(return_U, turns.tokens_U), np.cumsum(turns.trained_n)[:-1])
    for mask, spans_of, reward, values in zip(masks, spans, rewards, found, strict=True):
        assert_allclose(values, token_by_token(mask, spans_of, reward, discount), atol=1e-12)
