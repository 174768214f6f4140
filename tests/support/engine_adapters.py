"""Adapters in engines over tiny models, and the models merged with them."""

import numpy as np
from support.adapters import random_adapter
from support.models import full_logprobs

from marin_rl.config import LoraConfig
from marin_rl.inference.adapters import LoadedAdapter
from marin_rl.inference.engine import Engine
from marin_rl.inference.generation import GenerationResult
from marin_rl.lora.adapter import Adapter
from marin_rl.lora.adapter import merged as merged_parameters
from marin_rl.models.module import LanguageModel
from marin_rl.training.model import named_parameters, parameter_shapes, with_parameters

NATS = 2e-4


def adapter_for(
    model: LanguageModel,
    seed: int = 0,
    *,
    rank: int = 4,
    scale: float = 0.1,
    modules: tuple[str, ...] = ("all-linear",),
) -> Adapter:
    """Random arrays that move every distribution; `scale` is theirs, whatever the rank."""
    shapes = parameter_shapes(model)
    settings = LoraConfig(rank=rank, alpha=rank * scale, modules=modules)
    return random_adapter(settings, seed, shapes)


def merged(model: LanguageModel, adapter: Adapter) -> LanguageModel:
    """The model with the adapter in its matrices."""
    return with_parameters(model, merged_parameters(named_parameters(model), adapter))


def loaded_of(number: int) -> LoadedAdapter | None:
    """An adapter as a job has it, by the number of its load; None for 0, the base."""
    if number == 0:
        return None
    facts = {"name": "adapter", "weight_version": 0, "parameters_digest": ""}
    return LoadedAdapter(number=number, row=1, rank=1, **facts)


def load(engine: Engine, adapter: Adapter, name: str = "adapter", version: int = 5) -> int:
    """Load an adapter; the number of its load."""
    loaded = engine.adapters.load(
        adapter, name=name, weight_version=version, parameters_digest=f"digest of {name}"
    )
    return loaded.number


def unload_all(engine: Engine) -> None:
    """Unload every adapter that requests may name."""
    for adapter in engine.adapters.loaded:
        engine.adapters.unload(adapter.number)


def check_logprobs(result: GenerationResult, model: LanguageModel, prompt: np.ndarray) -> None:
    """Tokens were drawn with the logprobs that this model's own forward pass gives them."""
    for sample in result.samples:
        expected = full_logprobs(model, prompt, sample.token_ids)
        np.testing.assert_allclose(sample.logprobs, expected, atol=NATS)
