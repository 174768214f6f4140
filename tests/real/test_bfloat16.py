"""bfloat16 with a real model: an adapter trains, and the canary tells other weights from rounding.

30 layers round far more than the small models of other tests.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_rl import Config, run
from marin_rl.config import load_config
from marin_rl.errors import StalePolicy
from marin_rl.models.module import LanguageModel
from marin_rl.serving.server import PolicyServer
from marin_rl.serving.weights.canary import TOLERANCES, prove
from marin_rl.tokenizers import load_tokenizer
from marin_rl.training.hf_folders import load_hf
from marin_rl.training.logprobs import token_logprobs
from marin_rl.training.model import named_parameters, parameters_digest, with_parameters
from marin_rl.types import ServedPolicy, SlotRef

# Minutes of a busy machine's cores.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

DEBUG = Path(__file__).parents[2] / "configs/debug.yaml"
SMALL = {
    "policy": {"context_length": 96, "compute_dtype": "bfloat16"},
    "inference": {"engine": {"slots": 8, "chunk_steps": 4, "prefill_rows": 2}},
}


def test_an_adapter_in_bfloat16_trains_a_round(real_model: Path, tmp_path: Path) -> None:
    policy = {**SMALL["policy"], "init": "hf", "hf_path": str(real_model), "lora": {"rank": 8}}
    config = Config.load(
        {
            "run_id": "real",
            "root": str(tmp_path),
            "rounds": 1,
            "policy": policy,
            "environment": {"name": "echo"},
            "sampling": {"max_tokens": 8},
            "rollouts": {"groups_per_round": 2, "group_size": 2},
            "inference": SMALL["inference"],
            "filters": {"zero_signal": False},
            "batching": {"length_buckets": [96]},
            "training": {"microbatch_sequences": 4, "warmup_steps": 0},
            "evaluation": {"every_rounds": 1, "examples": 2},
        }
    )
    training = run(config)
    (round,) = training
    assert round.metrics["updates/steps"] == 1
    assert np.isfinite(round.metrics["loss"])


@pytest.fixture(scope="module")
def model(real_model: Path) -> LanguageModel:
    return load_hf(real_model)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(request, real_model: Path, model: LanguageModel) -> Iterator[tuple[str, ServedPolicy]]:
    """The model at a server that computes in a dtype."""
    digest, dtype = parameters_digest(model), request.param
    config = load_config(DEBUG, [f"inference={json.dumps(SMALL['inference'])}"]).inference
    server = PolicyServer(
        model,
        load_tokenizer(real_model),
        config,
        context_length=96,
        weight_version=0,
        parameters_digest=digest,
        dtype=jnp.dtype(dtype),
    )
    server.start("127.0.0.1", 0)
    yield (
        dtype,
        ServedPolicy(
            endpoints=(server.base_url,),
            model=server.model_id,
            weight_version=0,
            parameters_digest=digest,
            tokenizer_digest="",
            chat_template_digest="",
            checkpoint=SlotRef(slot="checkpoints/round-00000", sha256="0" * 64),
        ),
    )
    server.stop()


@pytest.fixture(scope="module")
def gradient(real_model: Path, model: LanguageModel) -> dict[str, jax.Array]:
    """Gradient of the log-likelihood of another dialogue than the canary's, all of its tokens."""
    text = "<|im_start|>user\nWhat is 26 + 17?<|im_end|>\n<|im_start|>assistant\n26 + 17 = 43."
    ids = np.asarray(load_tokenizer(real_model)(text)["input_ids"], np.int32)[None]
    positions, ones = np.arange(ids.size, dtype=np.int32)[None], np.ones_like(ids)

    def loss(parameters: dict[str, jax.Array]) -> jax.Array:
        rows = tuple(map(jnp.asarray, (ids, ones, positions, positions > 0)))
        scores = token_logprobs(with_parameters(model, parameters), *rows)
        return -jnp.sum(scores.logprobs)

    return jax.jit(jax.grad(loss))(named_parameters(model))


def updated(
    model: LanguageModel, gradient: dict[str, jax.Array], learning_rate: float
) -> LanguageModel:
    """The model after the first update of Adam, whose size is the learning rate for each weight."""
    steps = {name: learning_rate * g / (jnp.abs(g) + 1e-8) for name, g in gradient.items()}
    before = named_parameters(model)
    return with_parameters(model, {name: before[name] - steps[name] for name in before})


def test_the_canary_tells_other_weights_from_rounding(served, model, gradient) -> None:
    dtype, policy = served
    config = load_config(DEBUG).inference
    # Right weights pass with a margin, also where the trainer computes in bfloat16 as well.
    own = {name: array.astype(dtype) for name, array in named_parameters(model).items()}
    nats = [
        prove(policy, trained, config, dtype=jnp.dtype(dtype)).nats
        for trained in (model, with_parameters(model, own))
    ]
    assert max(nats) < TOLERANCES[dtype] / 1.5, nats
    # Weights one update away do not: of a usual size in float32, of a large one in bfloat16.
    learning_rate = 1e-5 if dtype == "float32" else 3e-4
    with pytest.raises(StalePolicy, match="nats apart on average of its 32 tokens"):
        prove(policy, updated(model, gradient, learning_rate), config, dtype=jnp.dtype(dtype))
