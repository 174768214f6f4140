"""The configuration tree: what it accepts, what it refuses and how it says so."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import refusals

from marin_rl.config import (
    Config,
    content_fields,
    differences,
    fingerprint_fields,
    free_keys,
    known_keys,
    load_config,
    override,
    parse_config,
    shipped_recipes,
)
from marin_rl.errors import ConfigError

GOLDEN = Path(__file__).parent / "golden"
SHIPPED = Path(__file__).parent.parent / "configs"
CONFIGS = sorted(SHIPPED.glob("*.yaml"))
RECIPES = shipped_recipes()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_file_loads_and_round_trips(path):
    config = load_config(path)
    assert parse_config(config.model_dump(mode="json")) == config


def test_new_keys_leave_no_trace_in_runs_that_do_not_set_them():
    """Fingerprints of slots are made of this: with one key more, no earlier run would go on."""
    golden = json.loads((GOLDEN / "default-content.json").read_text(encoding="utf-8"))
    # Earlier runs recorded `none`, the default of the time; new ones may choose.
    assert content_fields(Config.model_validate({"batching": {"packing": "none"}})) == golden


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_recipe_changes_the_objective_of_the_demo_and_nothing_else(recipe):
    plain = load_config(SHIPPED / "demo.yaml")
    config = load_config(SHIPPED / "demo.yaml", [f"recipe={recipe.name}"])
    adapters = recipe.name in ("lora", "qlora")
    sections = {"policy"} if adapters else {"objective", "filters"}
    if recipe.name == "qlora":  # activations are computed again
        sections |= {"training"}
    if recipe.name == "ppo":  # a critic is trained, several times over a round, on any group
        sections |= {"training", "rollouts"}
    if recipe.name == "dapo":  # samples until a round has its groups
        sections |= {"asynchrony"}
    untouched = {name: getattr(plain, name) for name in sections}
    assert config.model_copy(update=untouched) == plain
    assert set(recipe.settings) <= sections
    assert "arXiv:" in recipe.description


def test_recipes_are_known_by_name_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("run.yaml")
    file.write_text("recipe: dapo\n")
    assert load_config(file).objective.clip_high == 0.28
    file.write_text("seed: 1\n")
    expected = load_config(file, ["recipe=dapo"])
    for spelling in ("recipes/dapo.yaml", "dapo.yaml"):
        assert load_config(file, [f"recipe={spelling}"]) == expected
    Path("dapo.yaml").write_text("objective: {clip_high: 0.5}\n")  # a file of one's own is meant
    assert load_config(file, ["recipe=dapo.yaml"]).objective.clip_high == 0.5
    assert load_config(file, ["recipe=dapo"]) == expected


def test_an_unknown_recipe_is_answered_with_the_known_ones(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("seed: 1\n")
    for wrong in ("dappo", "recipes/dappo.yaml"):
        with pytest.raises(ConfigError, match="did you mean dapo") as refused:
            load_config(file, [f"recipe={wrong}"])
        assert all(recipe.name in str(refused.value) for recipe in RECIPES)


def test_a_run_has_one_copy_of_pairs_so_one_section_that_learns_from_them():
    both = {name: {"pairs": "pairs.jsonl"} for name in ("reward_model", "preference")}
    with pytest.raises(ConfigError, match=r"reward_model and preference .* expected one of them"):
        parse_config(both)


@pytest.mark.parametrize("section", ["reward_model", "preference"])
def test_learning_from_pairs_needs_no_room_for_completions(section):
    tree = {"policy": {"context_length": 32}, "sampling": {"max_tokens": 32}}
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        parse_config(tree)
    parse_config({**tree, section: {"pairs": "pairs.jsonl"}})


def test_a_recipe_lies_beneath_its_file_and_above_it_when_it_is_an_override(tmp_path):
    (tmp_path / "base.yaml").write_text("objective: {clip_low: 0.1, clip_high: 0.4}\n")
    file = tmp_path / "run.yaml"
    file.write_text("recipe: base.yaml\nobjective: {clip_low: 0.3}\n")
    objective = load_config(file).objective
    assert (objective.clip_low, objective.clip_high) == (0.3, 0.4)
    objective = load_config(file, ["recipe=base.yaml", "objective.clip_high=0.5"]).objective
    assert (objective.clip_low, objective.clip_high) == (0.1, 0.5)
    with pytest.raises(ConfigError, match=r"there is none at .*gone\.yaml"):
        load_config(file, ["recipe=gone.yaml"])
    file.write_text("recipe: 3\n")
    with pytest.raises(ConfigError, match="recipe is 3; expected the name of a recipe"):
        load_config(file)


REFUSED = """
objective.surrogate=gspo -> needs ratio_level sequence_mean, found sequence
environment.long_prompts=[1, -1]
    -> environment.long_prompts: expected refuse, drop, or a list of row numbers from 0 on
objective.surrogate=dppo -> needs ratio_level token, found sequence
objective.surrogate=sapo; objective.clip_dual=3 -> clip_dual is for ppo_clip
objective.cispo_clip_low=0.5 -> cispo_clip_low is for cispo, found ppo_clip
objective.surrogate=gmpo -> gmpo needs ratio_level sequence_mean, found seq
objective.surrogate=dppo_kl -> dppo_kl needs ratio_level token, found seq
objective.surrogate=dro -> surrogate dro needs dro_beta: found null
objective.dro_beta=0.1 -> dro_beta is for dro, found ppo_clip
objective.rejection=k2; objective.importance_correction=truncated
    -> go together: found rejection_level and rejection_high null
objective.rejection=k3; objective.rejection_level=sequence_max; objective.rejection_high=0.5
    -> importance_correction none does not ask for
objective.importance_correction=rejected -> rejected needs rejection, rejec
objective.importance_correction=truncated; objective.correction_low=1;
    objective.correction_high=1
    -> correction_low (1) must be below correction_high (1)
objective.advantage=remax -> true need each other: found remax and null
rollouts.greedy_baseline=true -> true need each other: found rloo and true
objective.advantage=remax; rollouts.greedy_baseline=true; sampling.temperature=0
    -> expected a temperature above 0
objective.advantage=remax; objective.advantage_scale=token_whitening;
    rollouts.greedy_baseline=true
    -> has a baseline of its own that is not trained on: expected none, group_std, batch_std
objective.kl_target=6 -> expected a first kl_coefficient above 0
objective.reference=average -> expected a kl_coefficient above 0, or referen
objective.advantage=reinforce; objective.advantage_scale=batch_std
    -> advantage_scale batch_std divides by a spread that is 0 where rewards are equal, and
    advantage reinforce is not
objective.advantage=reinforce_batch; objective.advantage_scale=group_std
    -> expected none, batch_std, batch_whitening, token_whitening
objective.advantage=maxrl; objective.overlong=soft_penalty
    -> advantage maxrl needs rewards of at least 0: expected keep or mask
objective.advantage=pass_at_k; objective.overlong=soft_penalty
    -> advantage pass_at_k would count a success that is penalised at all as a failure
training.schedule_restarts=2 -> 'constant' has no restarts
sft.schedule=constant; sft.schedule_restarts=2 -> 'constant' has no restarts
training.optimizer=muon; policy.lora.rank=2
    -> training.optimizer muon updates the matrices of layers
objective.advantage=gdpo; objective.overlong=soft_penalty
    -> advantage gdpo compares the components of rewards one by one: expected keep or mask
objective.advantage=pass_at_k; rollouts.group_size=4
    -> objective.pass_k is 4 and rollouts.group_size 4
sampling.top_p=0.9 -> Set importance_correction to truncated or masked
sampling.min_p=0.1 -> top_p 1 and top_k 0, min_p 0.1 with objective.importance
sampling.repetition_penalty=1.2; sampling.temperature=0
    -> top_p 1 and top_k 0, repetition_penalty 1.2 with objective.importance
sampling.repetition_penalty=1.2; distillation={}; objective.importance_correction=truncated
    -> found temperature 1, sampling.top_p 1 and top_k 0, repetition_penalty 1.2
sampling.top_k=5 -> top_p 1 and top_k 5 with objective.importance_correction
sampling.top_p=0.9; objective.kl_placement=reward; objective.kl_coefficient=0.1;
    objective.surrogate=reinforce
    -> top_p 0.9 and top_k 0 with objective.kl_placement reward
sampling.top_k=5; objective.kl_placement=reward; objective.kl_coefficient=0.1;
    objective.importance_correction=truncated
    -> Set kl_placement to loss, or sample with top_p 1 and top_k 0
objective.surrogate=reinforce; batching.staleness_rounds_max=1
    -> batching.staleness_rounds_max is 1, but objective.surrogate reinforce
retention.checkpoints_last=2; retention.best=eval/accurcy
    -> such as eval/accuracy or eval/pass@1, found eval/accurcy
retention.checkpoints_last=2; retention.best=eval/pass@8
    -> found eval/pass@8; evaluation.k is [1]
asynchrony.max_staleness=1; evaluation.patience=2
    -> evaluation.patience ends a run before the round after an evaluation
asynchrony.max_staleness=3; retention.checkpoints_last=3
    -> retention.checkpoints_last is 3, but asynchrony.max_staleness 3
asynchrony.max_staleness=1; inference.endpoints=['http://a:1/v1']
    -> inference.publish none leaves it to the endpoints
evaluation.k=[] -> evaluation.k
objective.kl_placement=reward; objective.advantage=grpo
    -> linear in the rewards (rloo, dr_grpo, reinforce, reinforce_batch, with scale none or
    token_whitening)
objective.kl_placement=reward; objective.kl_coefficient=0.1; objective.overlong=mask
    -> set filters.truncated instead, which leaves it out of both, or kl_placement loss
training.lerning_rate=1 -> did you mean training.learning_rate?
inference.flight=grpc://a:1 -> inference.flight: was withdrawn; servers read
flow.runner=root -> flow.runner=root: was withdrawn; use work_pool or ray
asynchrony.over_sampling_factor=2; asynchrony.select=best
    -> asynchrony.select=best: was withdrawn; set group_filter
asynchrony.curriculum=weights; asynchrony.curriculum_weights={0: {echo: 1}}
    -> asynchrony.curriculum_weights: was withdrawn; give the entries of environment
inference.server.header_timeout_s=5.0
    -> inference.server.header_timeout_s: was withdrawn; a reverse proxy bounds heads
learning_rate=1 -> did you mean training.learning_rate?
training.learning_rate=fast -> training.learning_rate
rollouts.group_size=1 -> rollouts.group_size
rollouts.group_size_min=1 -> 1 needs objective.advantage gae
objective.advantage=gae; objective.ratio_level=token
    -> objective.advantage gae needs a critic: expected training.critic, found null
training.critic={} -> training.critic is for objective.advantage gae: found rloo
objective.advantage=gae -> needs ratio_level token, found sequence
objective.advantage=gae; objective.advantage_scale=group_std
    -> advantage_scale group_std divides by the spread of rewards, and advantage gae is a
    critic's: expected none, batch_whitening, token_whitening
objective.advantage=optimal_token_baseline
    -> optimal_token_baseline differs from token to token and needs ratio_level token
objective.advantage=optimal_token_baseline; objective.ratio_level=token;
    objective.advantage_scale=token_whitening
    -> advantage_scale token_whitening divides advantages before a round is trained on
objective.advantage=optimal_token_baseline; objective.ratio_level=token; objective.overlong=mask
    -> set filters.truncated instead, which leaves it out of both
objective.advantage=optimal_token_baseline; objective.ratio_level=token;
    objective.kl_coefficient=0.1; objective.kl_placement=reward
    -> linear in the rewards
objective.advantage=optimal_token_baseline; objective.ratio_level=token;
    objective.turn_discount=1.0
    -> turn_discount has no meaning with advantage optimal_token_baseline
objective.advantage=optimal_token_baseline; objective.ratio_level=token; training.critic={}
    -> training.critic is for objective.advantage gae: found optimal_token_baseline
objective.advantage=optimal_token_baseline; objective.ratio_level=token; rollouts.group_size=1;
    rollouts.group_size_min=1
    -> for a baseline of the group needs others
training.critic.trunk=both -> training.critic.trunk
rounds=0 -> rounds
run_id=../escape -> run_id
policy.init=hf -> hf_path
policy.context_length=8; sampling.max_tokens=8 -> leaves no room for a prompt
rollouts.shards_per_round=17 -> at least one group
training.schedule=cosine -> schedule_steps
batching.length_buckets=[64, 32] -> ascend
batching.length_buckets=[32, 64] -> must reach policy.context_length (128)
mesh.context=4; batching.packing=sequences; batching.row_tokens=300
    -> cuts each row into 8 pieces: expected batching.row_tokens in multiples of 8, found 300
mesh.data=-1; mesh.fsdp=-1 -> only one of them may be -1
policy.model.heads=4; policy.model.kv_heads=3 -> kv_heads must divide heads
sft.environment.nam=echo -> did you mean sft.environment.name?
"""


@pytest.mark.parametrize(("overrides", "expected"), refusals(REFUSED))
def test_a_wrong_key_or_value_is_named(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        parse_config(override({}, overrides))
    assert expected in str(caught.value)


def test_a_value_that_is_no_number_is_refused():
    with pytest.raises(ConfigError, match=r"training\.learning_rate"):
        parse_config({"training": {"learning_rate": float("nan")}})


KL_IN_REWARD = {"kl_placement": "reward", "kl_coefficient": 0.1}
REJECTION = {"rejection": "k3", "rejection_level": "sequence_max", "rejection_high": 0.5}
ALONE = {"group_size": 1, "group_size_min": 1}


@pytest.mark.parametrize(
    "tree",
    [
        {"sampling": {"top_p": 0.9}, "objective": {"importance_correction": "truncated"}},
        {"sampling": {"top_k": 5}, "objective": {"surrogate": "reinforce"}},  # it has no ratio
        {"sampling": {"top_k": 5, "temperature": 0}},  # greedy: the filters are off
        {"sampling": {"top_p": 0.9, "temperature": 0}, "objective": KL_IN_REWARD},
        {
            "sampling": {"top_p": 0.9},
            "objective": {"kl_coefficient": 0.1, "importance_correction": "masked"},
        },
        {
            "batching": {"staleness_rounds_max": 1},
            "objective": {"surrogate": "reinforce", "importance_correction": "masked"},
        },
        {"objective": {"advantage": "reinforce_batch", "advantage_scale": "batch_std"}},
        {"objective": {"advantage": "pass_at_k", "pass_k": 3}, "rollouts": {"group_size": 4}},
        {"objective": {"advantage": "reinforce"}, "rollouts": ALONE},
        {"objective": {"advantage": "remax"}, "rollouts": {"greedy_baseline": True}},
        {"objective": {**REJECTION, "importance_correction": "rejected"}},
        {"objective": {**KL_IN_REWARD, "advantage": "reinforce", "overlong": "mask"}},
        {"objective": {"kl_coefficient": 0.1, "overlong": "mask"}},
        {"objective": {"advantage": "reinforce_batch"}, "rollouts": ALONE},
    ],
)
def test_valid_combinations_are_accepted(tree):
    found = parse_config(tree).model_dump()
    for section, settings in tree.items():
        assert settings.items() <= found[section].items()


def test_every_problem_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_config({"rounds": 0, "seed": -1, "policy": {"init": "magic"}})
    assert len(str(caught.value).splitlines()) == 4


def test_overrides_reach_into_sections_and_read_numbers(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("rounds: 3\ntraining: {beta1: 0.5}\n")
    config = load_config(
        path, ["training.learning_rate=1e-4", "rounds=7", "inference.endpoints=[http://a/v1]"]
    )
    assert config.training.learning_rate == 1e-4
    assert config.training.beta1 == 0.5
    assert config.rounds == 7
    assert config.inference.endpoints == ("http://a/v1",)


@pytest.mark.parametrize("item", ["rounds", "=3", "rounds.deeper=3", "rounds=[unclosed"])
def test_a_malformed_override_is_refused(item):
    with pytest.raises(ConfigError):
        override({"rounds": 3}, [item])


@pytest.mark.parametrize("text", ["- a list", "key: [unclosed", "\x00"])
def test_a_file_that_is_no_tree_is_refused_by_name(tmp_path, text):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load_config(path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"no configuration file at .*absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


def test_a_staleness_of_0_is_the_same_run_as_none():
    assert parse_config({"asynchrony": {"max_staleness": 0}}) == Config()
    assert parse_config({"asynchrony": {"max_staleness": 2}}).staleness_rounds_max == 2


def test_values_cannot_change_after_loading():
    with pytest.raises(ValueError, match="frozen"):
        Config().rounds = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_free_keys_are_outside_the_content_and_all_others_inside():
    def leaves(tree, prefix=""):
        for key, value in tree.items():
            yield prefix + key
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{key}.")

    inside = set(leaves(fingerprint_fields(Config())))
    free = set(free_keys())
    assert not inside & free
    whole_sections = {key.rpartition(".")[0] for key in free} | {"mesh", "trackers", "flow"}
    null = (
        "asynchrony",
        "sft.environment.", "training.critic", "reward_model", "preference", "distillation",
        "environment.reward_model", "training.load_balance_coefficient", "sft.train_on",
        "sft.schedule_restarts",
        "objective.cispo_clip_low", "objective.turn_discount", "objective.dro_beta",
        "objective.rejection", "rollouts.greedy_baseline", "evaluation.sets", "sampling.min_p",
        "sampling.repetition_penalty", "training.optimizer", "training.schedule_restarts",
        "environment.long_prompts", "environment.turns_max", "environment.tokens_max",
        "environment.tool_output_",
        "environment.chat_template_options", "policy.chat_template_options", "policy.end_tokens",
        "environment.step_timeout_s", "environment.mixture", "environment.on_broken_prefix",
        "objective.loss", "inference.engine.prefix_cache", "inference.engine.adapter",
        "rollouts.source", "policy.lora", "policy.quantize_base", "inference.serve_merged",
        "batching.packing",
    )  # fmt: skip
    for key in set(known_keys()) - inside - free:
        assert key in whole_sections or key.startswith(null), key


@given(st.integers(1, 10_000), st.floats(1e-8, 1e-1))
def test_differences_name_exactly_what_differs(groups, rate):
    old = fingerprint_fields(Config())
    new = fingerprint_fields(
        parse_config(
            {"rollouts": {"groups_per_round": groups}, "training": {"learning_rate": rate}}
        )
    )
    names = [line.split(":")[0] for line in differences(old, new)]
    assert ("rollouts.groups_per_round" in names) == (groups != 16)
    assert ("training.learning_rate" in names) == (rate != 3e-4)
    assert len(names) <= 2


def test_later_settings_leave_the_fingerprint_unchanged_while_null():
    plain = parse_config({})
    assert "critic" not in fingerprint_fields(plain)["training"]
    assert "critic" not in plain.model_dump(mode="json")["training"]
    config = load_config(SHIPPED / "debug.yaml", ["recipe=recipes/ppo.yaml"])
    assert fingerprint_fields(config)["training"]["critic"]["gae_lambda"] == 0.95
    assert parse_config(config.model_dump(mode="json")) == config
