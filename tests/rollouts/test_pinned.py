"""New runs of long dialogues keep the engine's cache; runs keep what they began with."""

from pathlib import Path

import pytest

from marin_rl.config import load_config, with_choices
from marin_rl.errors import ConfigError
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


def test_each_key_that_a_new_run_chooses_has_a_choice_and_keeps_the_users() -> None:
    asked: list[str] = []
    config = load_config("configs/debug.yaml")
    assert with_choices(config, asked.append) is config
    assert sorted(asked) == sorted(CHOICES)
    own = load_config("configs/debug.yaml", ["policy.lora.rank=4", "inference.serve_merged=true"])
    chosen = with_choices(own, lambda key: False)
    assert chosen.inference.serve_merged is True
    assert chosen.inference.engine.prefix_cache is False
