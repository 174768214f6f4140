"""New runs of long dialogues keep the engine's cache; runs keep what they began with."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from marin_rl.config import Config, PolicyConfig, load_config, parse_config, with_choices
from marin_rl.doctor.policy import prompts
from marin_rl.environments.chat import Chat
from marin_rl.environments.checks import environment_of
from marin_rl.errors import ConfigError, InputError
from marin_rl.rollouts.data_warnings import data_warnings, has_more_examples, rows_left_out
from marin_rl.rollouts.pinned import CHOICES, as_begun
from marin_rl.storage.runs import Run, refuse_other_content

LONG = (
    "policy.context_length=4096",
    "batching.length_buckets=[4096]",
    "inference.engine.slots=64",
    "environment={name: game, eval_seed: 2000000000}",
)


@pytest.mark.parametrize(
    ("override", "cached"),
    [
        ("policy.context_length=512", True),
        ("policy.context_length=511", None),
        ("inference.engine.slots=63", None),
        ("inference.engine.prefix_cache=false", False),
        ("inference.engine.prefix_cache=true", True),
        ("environment.turns_max=1", None),
        ("environment.name=echo", None),
        ("environment=[{name: echo}, {name: game, eval_seed: 2000000000}]", True),
        ("inference.endpoints=[http://127.0.0.1:1/v1]", None),
    ],
)
def test_a_new_run_of_long_dialogues_has_the_cache(override, cached):
    config = load_config("configs/debug.yaml", [*LONG, override])
    begun = as_begun(config)
    assert begun.inference.engine.prefix_cache is cached
    if cached is None:  # such runs are what they always were
        assert begun == config


def test_a_run_keeps_the_choice_that_it_began_with(tmp_path: Path) -> None:
    config = load_config("configs/debug.yaml", [*LONG, f"root={tmp_path}", "run_id=new"])
    assert Run.create_or_open(config, as_begun).config.inference.engine.prefix_cache is True
    again = Run.create_or_open(config, as_begun)
    assert again.config.inference.engine.prefix_cache is True
    assert Run.of(again.reference).config == again.config
    assert Run.open(str(tmp_path), "new").config.inference.engine.prefix_cache is True
    refuse_other_content(config)
    off = load_config(
        "configs/debug.yaml",
        [*LONG, f"root={tmp_path}", "run_id=new", "inference.engine.prefix_cache=false"],
    )
    with pytest.raises(ConfigError, match=r"inference\.engine\.prefix_cache: true -> false"):
        refuse_other_content(off)


def test_a_run_from_before_the_default_goes_on_without_the_cache(tmp_path: Path) -> None:
    config = load_config("configs/debug.yaml", [*LONG, f"root={tmp_path}", "run_id=old"])
    before = Run.create_or_open(config)
    after = Run.create_or_open(config, as_begun)
    assert before.config == after.config
    assert after.config.inference.engine.prefix_cache is None


ROWS_LEFT = ("batching.length_buckets=[]",)


@pytest.mark.parametrize(
    ("overrides", "packing"),
    [
        pytest.param(ROWS_LEFT, "auto", id="left to the run"),
        pytest.param((), None, id="padded lengths are given"),
        pytest.param((*ROWS_LEFT, "batching.row_tokens=64"), None, id="a row's length is given"),
        pytest.param((*ROWS_LEFT, "mesh.data=2"), None, id="several devices"),
        pytest.param((*ROWS_LEFT, "batching.packing=none"), "none", id="the user's own"),
    ],
)
def test_a_new_run_on_one_cpu_device_chooses_its_rows(overrides, packing, monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    config = load_config("configs/debug.yaml", overrides)
    assert as_begun(config).batching.packing == packing
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert as_begun(config).batching == config.batching


def test_a_run_from_before_rows_were_chosen_goes_on_with_padded_ones(tmp_path: Path) -> None:
    """Its run.json says `none`, which was the default."""
    left = [*ROWS_LEFT, f"root={tmp_path}", "run_id=old"]
    Run.create_or_open(load_config("configs/debug.yaml", [*left, "batching.packing=none"]))
    again = Run.create_or_open(load_config("configs/debug.yaml", left), as_begun)
    assert again.config.batching.packing == "none"


WIDE = "policy.model={hidden_size: 512, layers: 4, heads: 8, kv_heads: 4, intermediate_size: 2048}"


@pytest.mark.parametrize(
    ("stage", "overrides", "pairs"),
    [
        pytest.param("preference", ["policy.context_length=512"], 1, id="long"),
        pytest.param("preference", ["policy.context_length=64"], 8, id="short"),
        pytest.param("reward_model", ["policy.context_length=64"], 4, id="two rows"),
        pytest.param("preference", ["preference.loss.type=kto"], None, id="of a microbatch"),
        pytest.param("preference", ["preference.microbatch_pairs=3"], 3, id="the user's own"),
    ],
)
def test_a_new_run_on_a_cpu_takes_few_pairs_at_once(stage, overrides, pairs, monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    given = [WIDE, *ROWS_LEFT, f"{stage}.pairs=x", f"{stage}.pairs_per_step=12"]
    config = load_config("configs/debug.yaml", [*given, *overrides])
    assert as_begun(config).pair_training(stage).microbatch_pairs == pairs
    assert config.pair_training(stage).pairs_at_once == (3 if pairs == 3 else 32)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert as_begun(config).pair_training(stage) == config.pair_training(stage)


def test_each_key_that_a_new_run_chooses_has_a_choice_and_keeps_the_users() -> None:
    asked: list[str] = []
    for stage in ("preference", "reward_model"):
        config = load_config("configs/debug.yaml", [f"{stage}.pairs=x"])
        assert with_choices(config, asked.append) is config
    assert {*asked} == {*CHOICES}
    own = load_config("configs/debug.yaml", ["policy.lora.rank=4", "inference.serve_merged=true"])
    chosen = with_choices(own, lambda key: False)
    assert chosen.inference.serve_merged is True
    assert chosen.inference.engine.prefix_cache is False


def chat(tmp_path: Path, long: Collection[int], **section: Any) -> Config:
    """A run on 31 rows, of which some leave no room for a completion."""
    file = tmp_path / "rows.jsonl"
    rows = [{"id": f"r{n}", "prompt": "x" * (60 if n in long else 8)} for n in range(31)]
    file.write_text("".join(f"{json.dumps(row | {'answer': 'y'})}\n" for row in rows))
    tree = {
        "root": str(tmp_path / "runs"),
        "run_id": "run",
        "policy": {"context_length": 64},
        "rollouts": {"groups_per_round": 4},
    }
    own = {"name": "chat", "options": {"path": str(file)}, "long_prompts": "drop"}
    return parse_config(tree | (section or {"environment": own}))


def test_rows_without_room_are_left_out_counted_and_recorded(tmp_path: Path) -> None:
    long = [0, 17, 30]
    config = chat(tmp_path, long)
    assert prompts(config).startswith("longest of 28 prompts: ")
    told = "environment.long_prompts: 3 rows are left out"
    assert [text for text in data_warnings(config) if told in text]
    run = Run.create_or_open(config, as_begun)
    assert run.config.environment.long_prompts == tuple(long)
    again = Run.create_or_open(config, as_begun)
    assert again.config == run.config == Run.open(config.root, config.run_id).config
    environment = environment_of(again.config)
    assert isinstance(environment, Chat)
    assert (environment.size or 0) + environment.eval_size == 28
    seen = {environment.example(0, index, "train").example_id for index in range(60)}
    seen |= {environment.example(0, index, "eval").example_id for index in range(60)}
    assert seen == {f"r{n}" for n in range(31) if n not in long}
    # a run that has begun is measured by its own rows
    assert prompts(config).startswith("longest of 4 prompts: ")


def test_a_run_goes_on_with_the_rows_that_it_began_with(tmp_path: Path) -> None:
    config = chat(tmp_path, [3])
    Run.create_or_open(config, as_begun)
    wider = config.model_copy(update={"policy": PolicyConfig(context_length=128)})
    assert rows_left_out(wider, "environment") == ()
    refused = config.environment.model_copy(update={"long_prompts": None})
    with pytest.raises(ConfigError, match=r"environment.long_prompts: \[3\] -> null"):
        Run.create_or_open(config.model_copy(update={"environment": refused}), as_begun)


def test_a_run_without_long_rows_records_that_none_is_left_out(tmp_path, tmp_path_factory):
    config = chat(tmp_path, [])
    assert as_begun(config).environment.long_prompts == ()
    assert not [text for text in data_warnings(config) if "long_prompts" in text]
    with pytest.raises(InputError, match="no row is left for training"):
        environment_of(as_begun(chat(tmp_path_factory.mktemp("none"), range(31))))


def test_each_environment_of_a_list_leaves_out_its_own_rows(tmp_path: Path) -> None:
    own = chat(tmp_path, [5]).environment.model_dump()
    config = chat(tmp_path, [5], environment={"mixture": [{"name": "echo"}, own]})
    run = Run.create_or_open(config, as_begun)
    assert [each.long_prompts for each in run.config.environment.mixture or ()] == [None, (5,)]
    assert Run.create_or_open(config, as_begun).config == run.config


def test_rows_are_left_out_of_training_files_alone(tmp_path: Path) -> None:
    own = chat(tmp_path, [5]).environment.model_dump()
    for section, words in (
        ({"environment": {"name": "echo", "long_prompts": "drop"}}, "which echo does not read"),
        ({"evaluation": {"sets": {"own": own}}}, "evaluation.sets.own.long_prompts: expected"),
    ):
        with pytest.raises(ConfigError, match=words):
            as_begun(chat(tmp_path, [5], **section))


def configured(folder: Path, examples: int) -> Config:
    rows = [{"id": f"p{number}", "prompt": f"{number}?", "answer": "1"} for number in range(200)]
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tree = load_config("configs/debug.yaml").model_dump(mode="json")
    tree["environment"] |= {"name": "chat", "options": {"path": str(folder / "p.jsonl")}}
    tree["evaluation"]["examples"] = examples
    return parse_config(tree)


def test_a_small_held_out_set_is_a_warning(tmp_path: Path) -> None:
    (warning,) = data_warnings(configured(tmp_path, 40))
    assert "evaluation.examples is 40, but environment holds out 25 of its 200 rows" in warning
    assert "raise environment.options.eval_fraction" in warning
    assert data_warnings(configured(tmp_path, 25)) == []
    assert [has_more_examples(configured(tmp_path, n)) for n in (40, 25, 20)] == [
        False,
        False,
        True,
    ]


def test_an_environment_without_an_end_has_no_warning() -> None:
    assert data_warnings(load_config("configs/debug.yaml")) == []


def test_an_environment_without_rows_is_not_advised_to_hold_out_more() -> None:
    game = "environment={name: game, eval_seed: 2000000000}"
    (warning,) = data_warnings(load_config("configs/debug.yaml", [game, "evaluation.examples=9"]))
    assert warning == (
        "evaluation.examples is 9, but environment has 8 different ones, so every evaluation has 8 "
        "examples"
    )


def test_one_example_is_one(tmp_path: Path) -> None:
    tree = configured(tmp_path, 40).model_dump(mode="json")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    tree["environment"]["options"]["eval_fraction"] = 1.0
    (warning,) = data_warnings(parse_config(tree))
    assert "holds out 1 of its 1 rows, so every evaluation has 1 example;" in warning


def test_evaluation_sets_are_named(tmp_path: Path) -> None:
    tree = configured(tmp_path, 40).model_dump(mode="json")
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "a", "tools": [1]}\n{"prompt": "b", "answer": "2"}\n')
    options = {"path": str(other), "eval_fraction": 1.0}
    tree["evaluation"]["sets"] = {"hard": {"name": "chat", "options": options}}
    warnings = "\n".join(data_warnings(parse_config(tree)))
    assert "evaluation.sets.hard holds out 2 of its 2 rows" in warnings
    assert "1 of 2 rows have a column tools" in warnings
    assert "1 of 2 rows have no answer" in warnings


def test_rows_that_are_only_shown_have_no_sentence_on_rewards(tmp_path: Path) -> None:
    """A file of demonstrations for a warm start, then the same file for a flow of its own."""
    shown = tmp_path / "shown.jsonl"
    shown.write_text("".join(f'{{"prompt": "{n}", "completion": "{n}"}}\n' for n in range(9)))
    options = {"path": str(shown)}
    tree = configured(tmp_path, 25).model_dump(mode="json")
    tree["policy"]["init"] = "sft"
    tree["sft"]["environment"] = {"name": "chat", "train_seed": 4000000000, "options": options}
    assert data_warnings(parse_config(tree)) == []
    tree["environment"]["options"] = options
    del tree["sft"]["environment"]
    config = parse_config(tree)
    assert f"{shown}: 9 of 9 rows have no answer: exact_match gives them 0" in data_warnings(config)
    assert data_warnings(config, scored=False) == []
