"""The folder that `make test-real` makes is the model: it answers as SmolLM2 does."""

from pathlib import Path

import pytest

from marin_rl import Engine

pytestmark = pytest.mark.slow

SMALL = {"policy.context_length": 96, "sampling.max_tokens": 20, "inference.engine.slots": 1}


def test_the_model_answers(real_model: Path) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    with Engine(real_model, overrides=SMALL) as engine:
        (completion,) = engine.generate([[question]], max_tokens=20, temperature=0.0)
    assert "Paris" in completion.text
