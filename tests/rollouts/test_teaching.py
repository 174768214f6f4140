"""A teacher's column of a shard: what it reads, what it refuses, and that it is asked once."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.fakes import FakePolicyServer, served_policy
from support.run_factories import group, rollout

from marin_rl.config import Config, load_config
from marin_rl.doctor.policy import check_tokenization, teacher
from marin_rl.environments.checks import environment_of
from marin_rl.errors import CommitConflict, ConfigError, InputError
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.rollouts.generate import generate_shard
from marin_rl.rollouts.teaching import add_teacher_logprobs, prove_teacher, with_context
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import decode_shard, seal_round
from marin_rl.tokenizers import tokenizer_for
from marin_rl.types import Message, Turn

DIGEST = "ab" * 32
CONTEXT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "HO"}]
TURNS = f"distillation.context={json.dumps(CONTEXT)}"
TAUGHT = ("distillation.coefficient=1", "objective.ratio_level=token")


class Counting:
    """Gives each token minus its place in what it read; remembers what it read."""

    def __init__(self, identity: str = DIGEST, offset: float = 0.0) -> None:
        self.identity, self._offset = identity, offset
        self.read: list[list[int]] = []

    def score(self, sequences: Sequence[np.ndarray], first: Sequence[int]) -> list[np.ndarray]:
        self.read += [ids.tolist() for ids in sequences]
        return [
            -np.arange(at, len(ids), dtype=np.float32) - np.float32(self._offset)
            for ids, at in zip(sequences, first, strict=True)
        ]


def configured(root: Path | str, *items: str) -> Config:
    return load_config("configs/debug.yaml", [f"root={root}", *TAUGHT, *items])


def scored(config: Config, groups: list, teacher: Counting) -> list:
    return add_teacher_logprobs(groups, config, environment_of(config), teacher)


def test_each_sampled_token_gets_its_score_and_what_has_none_is_not_asked_about():
    config, counting = configured("runs"), Counting()
    failed = rollout("a/2", index=2, status="error")
    first = group("a", [1.0, 0.0])
    groups = [replace(first, rollouts=(*first.rollouts, failed))]
    ((one, two, left),) = (g.rollouts for g in scored(config, groups, counting))
    assert left is failed
    assert counting.read == [one.token_ids.tolist(), two.token_ids.tolist()]
    assert one.teacher_logprobs is not None
    places = np.arange(len(one.token_ids), dtype=np.float32)
    assert one.teacher_logprobs.tolist() == (-places * one.loss_mask).tolist()


def test_each_segment_is_read_by_itself():
    whole = rollout("cut/0", prompt=[1, 4, 5, 6], completion=[2, 3, 7])
    cut = replace(
        whole,
        token_ids=np.array([1, 2, 3, 4, 5, 6, 7], np.int32),
        loss_mask=np.array([0, 1, 1, 0, 0, 0, 1], np.int32),
        segment_lengths=(3, 4),
    )
    counting = Counting()
    groups = [replace(group("cut", [1.0]), rollouts=(cut,))]
    ((found,),) = (g.rollouts for g in scored(configured("runs"), groups, counting))
    assert counting.read == [[1, 2, 3], [4, 5, 6, 7]]
    assert found.teacher_logprobs.tolist() == [0, -1, -2, 0, 0, 0, -3]


def test_numbers_that_are_not_finite_are_one_error():
    with pytest.raises(InputError, match="a/0 log-probabilities that are not finite: found nan"):
        scored(configured("runs"), [group("a", [1.0])], Counting(offset=float("nan")))


def test_a_context_comes_first_but_for_a_system_message():
    system, asked = Message(role="system", content="s"), Message(role="user", content="q")
    turns = [Message(role="user", content="hi"), Message(role="assistant", content="HO")]
    assert with_context([asked], turns) == [*turns, asked]
    assert with_context([system, asked], turns) == [system, *turns, asked]
    own = [replace(system, content="t"), *turns]
    assert with_context([asked], own) == [*own, asked]
    assert with_context([system, asked], own) == [*own, system, asked]


@pytest.fixture
def server() -> Iterator[FakePolicyServer]:
    with FakePolicyServer(served_model_id("policy", 0, DIGEST)) as fake:
        yield fake


def test_a_shard_is_scored_once_and_names_its_teacher(tmp_path, server):
    """A process that comes after the commit asks no teacher, and another teacher conflicts."""
    policy = served_policy(
        server.url, served_model_id("policy", 0, DIGEST), parameters_digest=DIGEST
    )
    run = Run.create_or_open(configured(tmp_path, "rollouts.shards_per_round=1"))

    def generate(teacher: Counting):
        return asyncio.run(generate_shard(run, 0, 0, policy, None, teacher))

    first, again = Counting(), Counting()
    ref = generate(first)
    assert len(first.read) == 16
    assert generate(again).sha256 == ref.sha256
    assert again.read == []
    with pytest.raises(CommitConflict):
        generate(Counting("cd" * 32))
    table = decode_shard(run.store.read(ref.slot))
    for row in table.to_pylist():
        places = -np.arange(len(row["token_ids"])) * np.array(row["loss_mask"])
        assert row["teacher_logprobs"] == places.tolist()
    sealed = seal_round(run, 0, [ref], (policy.checkpoint,))
    assert manifest_of(run.store, sealed).extra["teacher"] == [DIGEST]
    prove_teacher(run, Counting())
    with pytest.raises(InputError, match=r"the teacher is cdcd.* but that of round 0 was abab"):
        prove_teacher(run, Counting("cd" * 32))


def test_a_teacher_that_contradicts_itself_is_refused(tmp_path):
    class Drifting(Counting):
        def score(self, sequences, first):
            self._offset += 0.5
            return super().score(sequences, first)

    run = Run.create_or_open(configured(tmp_path))
    for each, found in ((Drifting(), "0.5"), (Counting(offset=float("nan")), "nan")):
        with pytest.raises(InputError, match=f"that differ by {found} nats"):
            prove_teacher(run, each)


def test_the_context_is_the_prompt_as_the_template_writes_it():
    config, asked = configured("runs", TURNS), Message(role="user", content="what?")
    tokenizer = tokenizer_for(config.policy)

    def ids_of(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    question = [{"role": "user", "content": asked.content}]
    made = rollout("a/0", prompt=ids_of(question), completion=[9, 8, 7])
    turns = (Turn(role="user", content=asked.content), *made.turns[1:])
    groups = [replace(group("a", [1.0]), rollouts=(replace(made, turns=turns),))]
    counting = Counting()
    ((found,),) = (g.rollouts for g in scored(config, groups, counting))
    taught = ids_of([*CONTEXT, *question])
    assert counting.read == [[*taught, 9, 8, 7]]
    start = len(ids_of(question))
    assert found.teacher_logprobs is not None
    assert found.teacher_logprobs[start:].tolist() == [-len(taught) - n for n in range(3)]
    other = replace(made, turns=(Turn(role="user", content="else"), *made.turns[1:]))
    with pytest.raises(InputError, match="the prompt of a/0 is not what the chat template makes"):
        scored(config, [replace(groups[0], rollouts=(other,))], counting)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (("sampling.temperature=0.7",), "at temperature 1, of all tokens"),
        (
            ("sampling.top_p=0.9", "objective.importance_correction=truncated"),
            "at temperature 1, of all tokens",
        ),
        (("objective.ratio_level=sequence",), "objective.ratio_level token, found sequence"),
        (("distillation.folder=a", "distillation.checkpoint=b"), "two teachers"),
        (("distillation.environments=[echo]",), "'echo' is none of the environments"),
        (
            (
                f"distillation.context={json.dumps(CONTEXT)}",
                "environment.on_broken_prefix=segments",
            ),
            "distillation.context precedes one prompt",
        ),
        (("asynchrony.max_staleness=1", "asynchrony.sampler=windowed"), "all of a shard at once"),
    ],
)
def test_settings_that_contradict_a_teacher_are_refused(items, message):
    with pytest.raises(ConfigError, match=message):
        configured("runs", *items)


def test_another_tokenizer_is_named_by_the_first_text_that_differs():
    policy = configured("runs").policy
    own = tokenizer_for(policy)
    check_tokenization(policy, ["ab", "abc"], lambda text: own.encode(text), "here")
    with pytest.raises(InputError, match=r"here: .*for 'abc' expected the 3 ids .* found 2.* at 2"):
        check_tokenization(policy, ["ab", "abc"], lambda text: own.encode(text)[:2], "here")


def test_a_teacher_that_is_not_there_is_refused_before_work(tmp_path):
    with pytest.raises(InputError, match=r"distillation\.folder: no model at"):
        teacher(configured(tmp_path, f"distillation.folder={tmp_path}"))
    place = f"{tmp_path}/none/checkpoints/round-00000"
    with pytest.raises(Exception, match="none"):
        teacher(configured(tmp_path, f"distillation.checkpoint={place}"))
    assert teacher(configured(tmp_path)) == "the run's first checkpoint, which reads 0 tokens more"
