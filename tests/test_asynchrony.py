"""The section `asynchrony`: names of defaults, what leaves no trace, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from support.cases import refusals

from marin_rl.commands.run import plan_rows
from marin_rl.config import (
    AsynchronyConfig,
    Config,
    fingerprint_fields,
    load_config,
    of_older_version,
    parse_config,
)
from marin_rl.config.sections import RENAMED
from marin_rl.errors import ConfigError
from marin_rl.planning import plan
from marin_rl.rollouts.pinned import as_begun

DEBUG = Path(__file__).parents[1] / "configs" / "debug.yaml"
SIGNAL = "filters.zero_signal=true"


def configured(*overrides: str) -> Config:
    return load_config(DEBUG, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ("asynchrony.dynamic_sampling=none", "asynchrony.over_sampling.select=index"),
        ("asynchrony.max_staleness=0", "asynchrony.group_filter=null"),
        ("asynchrony.partial_tokens=false", "asynchrony.limits.shared_device=time_sliced"),
    ],
)
def test_defaults_by_name_are_the_run_that_says_nothing(overrides: tuple[str, ...]) -> None:
    assert configured(*overrides) == configured()
    assert "asynchrony" not in fingerprint_fields(configured(*overrides))


def test_a_round_has_examples_for_all_that_it_may_sample() -> None:
    config = configured(SIGNAL, "asynchrony.dynamic_sampling=3", "asynchrony.over_sampling=1.1")
    assert (config.candidates_per_batch, config.sample_batches_max) == (5, 3)
    assert config.examples_per_round == 15
    least, most = 3 * 5 * 4, 3 * 15 * 4
    assert (plan(config).rollouts, plan(config).rollouts_max) == (least, most)


OLDER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"over_staleness": "wait", "sampler": "windowed"}, {"sampler": "windowed_wait"}),
    (
        {"in_flight_updates": True, "recompute_kv_cache": False, "sampler": "windowed"},
        {"in_flight_updates": "keep_kv_cache", "sampler": "windowed"},
    ),
    ({"partial_rollout": True}, {"partial_tokens": 1024}),
    ({"partial_rollout": True, "partial_tokens": 5}, {"partial_tokens": 5}),
    ({"dynamic_sampling": "filter"}, {"dynamic_sampling": 10}),
    ({"dynamic_sampling": "filter", "max_sample_batches": 3}, {"dynamic_sampling": 3}),
    (
        {"over_sampling_factor": 1.5, "select": "first_done"},
        {"over_sampling": {"factor": 1.5, "select": "first_done"}},
    ),
    ({"group_filter": "diversity"}, {"group_filter": {"score": "diversity"}}),
    (
        {"group_filter": "min_reward", "group_filter_min": 0.5},
        {"group_filter": {"score": "min_reward", "min": 0.5}},
    ),
    ({"curriculum": "solve_rate"}, {"curriculum": 8}),
    ({"curriculum": "solve_rate", "curriculum_window_rounds": 2}, {"curriculum": 2}),
    (
        {"sampler": "windowed", "claim_s": 5.0, "shared_device": "refuse"},
        {"sampler": "windowed", "limits": {"claim_s": 5.0, "shared_device": "refuse"}},
    ),
]


@pytest.mark.parametrize(("recorded", "expected"), OLDER)
def test_keys_that_older_runs_recorded_have_a_place(recorded, expected):
    section = AsynchronyConfig(max_staleness=2, **of_older_version(recorded))
    assert section == AsynchronyConfig(max_staleness=2, **expected)
    as_it_is = section.model_dump()
    assert of_older_version(as_it_is) == as_it_is


def test_an_asynchrony_has_ten_keys_and_older_ones_name_their_place() -> None:
    assert len(AsynchronyConfig.model_fields) == 10
    for name, instead in RENAMED.items():
        with pytest.raises(ConfigError, match=f"{name}: was withdrawn; {instead.split(' ')[0]}"):
            configured("asynchrony.max_staleness=1", f"{name}=1")


def test_a_factor_is_exact() -> None:
    """1.1 times 10 groups are 11, though 1.1 * 10 is more than that in floating point."""
    config = configured("rollouts.groups_per_round=10", "asynchrony.over_sampling.factor=1.1")
    assert config.candidates_per_batch == 11


KEYS_REFUSED = r"""
asynchrony.over_sampling.select=first_done -> set over_sampling.factor
asynchrony.group_filter=divers -> is not known: expected one of
asynchrony.group_filter=min_reward -> needs min, the least that passes: found null
asynchrony.group_filter=absent.py:score -> no file absent.py
asynchrony.over_sampling=1 -> greater than 1
asynchrony.dynamic_sampling=replace -> found 'replace'; expected filter, or the batches
asynchrony.dynamic_sampling=filter -> found filters.zero_signal false
filters.zero_signal=true; asynchrony.dynamic_sampling=filter; objective.advantage=reinforce
    -> found objective.advantage reinforce
filters.zero_signal=true; asynchrony.dynamic_sampling=filter; rollouts.source=pushed
    -> found rollouts.source pushed
"""


@pytest.mark.parametrize(("overrides", "message"), refusals(KEYS_REFUSED))
def test_keys_that_cannot_go_together_are_refused_with_what_to_do(overrides, message):
    with pytest.raises(ConfigError, match=message):
        configured(*overrides)


def test_the_recipe_dapo_samples_until_a_round_has_its_groups() -> None:
    tree: dict[str, Any] = configured().model_dump(mode="json")
    assert parse_config(tree).samples_on is False
    config = Config.load({"recipe": "dapo"})
    assert (config.samples_on, config.sample_batches_max) == (True, 10)


REPLAY = "asynchrony.replay.max_uses=2"
WINDOW = ("asynchrony.max_staleness=1", "asynchrony.sampler=windowed")
IN_FLIGHT = (*WINDOW, "asynchrony.in_flight_updates=true")
VLLM = ("inference.publish=vllm_reload", "inference.route=vllm_generate")
REMOTE = ("inference.endpoints=[http://host/v1]",)

MODES_REFUSED = r"""
asynchrony.curriculum=solve_rate; asynchrony.max_staleness=1; asynchrony.sampler=windowed
    -> expected sampler in_order
asynchrony.curriculum=solve_rate; rollouts.source=pushed
    -> asynchrony.curriculum is for groups that the run samples
asynchrony.replay.max_uses=2
    -> nothing older than 0 is trained on: set batching.staleness_rounds_max=1
asynchrony.replay.max_uses=2; asynchrony.max_staleness=2; asynchrony.replay.window_rounds=3
    -> groups that are 5 rounds old, and nothing older than 2
asynchrony.replay.max_uses=1 -> greater than or equal to 2
asynchrony.in_flight_updates=true; asynchrony.max_staleness=1
    -> there the policy of a round follows from its number
asynchrony.limits.claim_s=5 -> limits.claim_s is 5.0, a setting of sampler windowed
asynchrony.partial_tokens=5; asynchrony.over_sampling={factor: 2, select: first_done}
    -> partial_tokens with over_sampling.select first_done
asynchrony.partial_tokens=true; rollouts.source=pushed
    -> partial_tokens is for groups that the run samples
asynchrony.partial_tokens=0 -> greater than or equal to 1
asynchrony.max_staleness=1; asynchrony.sampler=windowed; asynchrony.in_flight_updates=true;
    objective.surrogate=reinforce
    -> tokens of several policies, but objective.surrogate reinforce .* set
    objective.importance_correction to truncated or masked
asynchrony.max_staleness=1; asynchrony.sampler=windowed; asynchrony.in_flight_updates=true;
    inference.endpoints=[http://host/v1 zone=eu]; inference.publish=update_weights_from_disk
    -> endpoints that come and go \(http://host/v1 zone=eu, publish
    update_weights_from_disk\): one that joins would be sent the weights that sampling began
    with
asynchrony.max_staleness=1; asynchrony.sampler=windowed; asynchrony.in_flight_updates=true;
    inference.endpoints=[http://host/v1]; inference.publish=vllm_reload
    -> publish vllm_reload and route chat: vLLM answers with the policy of each token on one
    route alone
asynchrony.max_staleness=1; asynchrony.sampler=windowed; asynchrony.in_flight_updates=true;
    inference.endpoints=[http://host/v1]; inference.publish=update_weights_from_disk;
    inference.route=vllm_generate
    -> expected publish vllm_reload and route vllm_generate together
asynchrony.max_staleness=1; asynchrony.sampler=windowed; asynchrony.in_flight_updates=true;
    inference.publish=vllm_reload; inference.route=vllm_generate;
    inference.endpoints=file:/fleet.txt
    -> one that joins would have no weights of the run until the next checkpoint
asynchrony.max_staleness=1; asynchrony.sampler=windowed; asynchrony.in_flight_updates=true;
    inference.endpoints=[http://host/v1]; inference.publish=vllm_reload;
    inference.route=vllm_generate; asynchrony.in_flight_updates=keep_kv_cache
    -> only together with the caches of completions under way
inference.endpoints=[http://host/v1]; inference.publish=lora_adapter;
    inference.route=vllm_generate
    -> expected the chat route with publish: lora_adapter
asynchrony.max_staleness=1; asynchrony.sampler=windowed; asynchrony.in_flight_updates=true;
    inference.endpoints=[http://host/v1]; inference.publish=update_weights_from_disk;
    inference.route=sglang
    -> inference.route sglang: these endpoints do not answer
asynchrony.max_staleness=1; asynchrony.sampler=windowed; asynchrony.in_flight_updates=true;
    policy.lora.rank=4; inference.serve_merged=false
    -> requests end on the adapter that they began with
asynchrony.replay.max_uses=2; batching.staleness_rounds_max=1; rollouts.source=pushed
    -> expected replay null
asynchrony.replay.max_uses=2; batching.staleness_rounds_max=1; objective.surrogate=reinforce
    -> set objective.importance_correction to truncated or masked, or choose a surrogate
asynchrony.max_staleness=1; objective.surrogate=reinforce
    -> asynchrony.max_staleness is 1, but objective.surrogate reinforce takes every rollout
"""


@pytest.mark.parametrize(("overrides", "message"), refusals(MODES_REFUSED))
def test_modes_that_a_run_cannot_have_are_refused_with_what_to_do(overrides, message):
    with pytest.raises(ConfigError, match=message):
        configured(*overrides)


def test_a_device_that_sampling_and_training_share_is_refused_or_time_sliced() -> None:
    ahead, refuse = "asynchrony.max_staleness=1", "asynchrony.limits.shared_device=refuse"
    with pytest.raises(ConfigError, match=r"expected inference\.endpoints"):
        configured(ahead, refuse)
    with pytest.raises(ConfigError, match="expected max_staleness of 1 to 8, found 0"):
        configured(refuse)
    remote = ("inference.endpoints=[http://host:8000/v1]", "inference.publish=pull")
    assert fingerprint_fields(configured(ahead, refuse, *remote))["asynchrony"] == {
        "max_staleness": 1
    }
    assert configured(ahead, "asynchrony.limits.shared_device=time_sliced") == configured(ahead)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        # One device takes both in turn.
        ((), None),
        (("asynchrony.max_staleness=1",), None),
        (
            ("inference.endpoints=[http://host/v1]",),
            "sampling and training alternate; asynchrony.max_staleness 1 would save up to 4% of a "
            "round (estimate)",
        ),
        (
            (
                "asynchrony.max_staleness=1",
                "inference.endpoints=[http://host/v1]",
                "inference.publish=pull",
            ),
            "sampling during training saves up to 4% of a round (estimate)",
        ),
    ],
)
def test_a_plan_says_what_overlap_gains(overrides: tuple[str, ...], line: str | None) -> None:
    config = configured(*overrides)
    assert plan_rows(config, plan(config)).get("overlap") == line


def test_overlap_saves_the_shorter_side() -> None:
    """16 rollouts a round: 8 tokens sampled, 2 operations each; 64 trained, 6 operations each."""
    assert plan(configured()).overlap_saves == 16 / (16 + 384)


def test_a_curriculum_reserves_the_examples_that_it_chooses_from() -> None:
    config = configured("asynchrony.curriculum=solve_rate")
    assert (config.examples_per_round, config.examples_reserved) == (4, 16)
    assert configured("asynchrony.curriculum=none") == configured()


def test_groups_that_are_used_again_are_planned_for() -> None:
    plain = plan(configured()).tokens_trained_max
    again = configured(REPLAY, "asynchrony.replay.select=newest", "batching.staleness_rounds_max=1")
    assert plan(again).tokens_trained_max == 2 * plain
    assert again.model_dump()["asynchrony"] == {
        "max_staleness": 0, "replay": {"max_uses": 2, "window_rounds": 1}
    }  # fmt: skip


def test_weights_that_change_in_flight_are_a_choice_of_the_window() -> None:
    chosen = configured(*IN_FLIGHT)
    assert (chosen.in_flight_updates, chosen.recompute_kv_cache, chosen.mixes_policies) == (
        True, True, True,
    )  # fmt: skip
    kept = configured(*WINDOW, "asynchrony.in_flight_updates=keep_kv_cache")
    assert kept.in_flight_updates
    assert not kept.recompute_kv_cache
    plain = configured(*WINDOW)
    assert configured(*WINDOW, "asynchrony.in_flight_updates=false") == plain
    assert fingerprint_fields(plain)["asynchrony"] == {"max_staleness": 1, "sampler": "windowed"}
    assert not plain.recompute_kv_cache
    endpoints = configured(*IN_FLIGHT, *REMOTE, "inference.publish=update_weights_from_disk")
    assert endpoints.in_flight_updates
    vllm = configured(*IN_FLIGHT, *REMOTE, *VLLM)
    assert (vllm.in_flight_updates, vllm.recompute_kv_cache) == (True, True)
    for entry in ("registered", "[http://host/v1,http://other/v1]", "file:/fleet.txt"):
        follow = (f"inference.endpoints={entry}", "inference.publish=pull")
        adapted = configured(*IN_FLIGHT, *follow, "policy.lora.rank=4")
        assert as_begun(adapted).inference.serve_merged is True, "requests end on an adapter"
    adapted = configured(*WINDOW, *follow, "policy.lora.rank=4")
    assert as_begun(adapted).inference.serve_merged is False
