"""Every combination of keys has programs that can be built: traced by shapes, nothing computed."""

from itertools import product
from pathlib import Path

import haliax as hax
import pytest
from support.cases import others_slow

from marin_rl.config import Config, load_config
from marin_rl.doctor.engines import programs, reward_model_programs
from marin_rl.errors import ConfigError
from marin_rl.inference.linear_layers import LoraLinear
from marin_rl.tokenizers import tokenizer_for
from marin_rl.training import hidden_states, tracing

DEBUG = Path(__file__).parents[2] / "configs/debug.yaml"
# SmolLM2's but for layers: more of them than are written out one by one, so that they are scanned.
REAL = (
    "policy.model={hidden_size: 576, layers: 9, heads: 9, kv_heads: 3, intermediate_size: 1536, "
    "vocab_size: 49152}",
)
TRAINED = {
    "full": (),
    "lora": ("policy.lora.rank=8",),
    "int8": ("policy.lora.rank=8", "policy.quantize_base=int8"),
    "nf4": ("policy.lora.rank=8", "policy.quantize_base=nf4"),
}
DTYPES = "float32", "bfloat16"
COMBINATIONS = list(
    product(TRAINED, DTYPES, (True, False), (False, True), ("none", "sequences", "shared_prompt"))
)
OFTEN = (("nf4", "bfloat16", False, True, "shared_prompt"),)


def real(*overrides: str) -> Config:
    return load_config(DEBUG, [*REAL, *overrides])


@pytest.mark.parametrize(
    ("trained", "dtype", "tied", "checkpointing", "packing"),
    others_slow(COMBINATIONS, *OFTEN, several=True),
)
def test_every_program_can_be_built(trained, dtype, tied, checkpointing, packing) -> None:
    config = real(
        *TRAINED[trained],
        f"policy.compute_dtype={dtype}",
        f"policy.model.tie_embeddings={str(tied).lower()}",
        f"training.gradient_checkpointing={str(checkpointing).lower()}",
        f"batching.packing={packing}",
        *([] if packing == "none" else ["batching.row_tokens=256"]),
    )
    assert config.policy.model.layers > hidden_states.UNROLLED_LAYERS_MAX
    assert tracing.trace_programs(config, tokenizer_for(config.policy)) == 4


@pytest.mark.parametrize(
    ("overrides", "count"),
    others_slow(
        [
            (
                (
                    "objective={advantage: gae, ratio_level: token}",
                    "training.critic={warmup_rounds: 1}",
                ),
                6,
            ),
            (("batching.length_buckets=[]",), 4),
            (("objective={advantage: optimal_token_baseline, ratio_level: token}",), 5),
            (("objective.kl_coefficient=0.1", "objective.reference=average"), 4),
            (("policy.lora.rank=8", "inference.serve_merged=false"), 4),
            (("policy.lora.rank=8", "policy.model.vocab_size=104", "mesh.fsdp=2"), 4),
            (("policy.init=sft",), 5),
        ],
        several=True,
    ),
)
def test_parts_that_a_run_may_have_are_traced_too(overrides, count) -> None:
    config = real("policy.compute_dtype=bfloat16", *overrides)
    assert programs(config) == f"{count} traced by shapes"


@pytest.mark.parametrize(
    ("trained", "dtype"), others_slow(product(TRAINED, DTYPES), ("lora", "bfloat16"), several=True)
)
def test_the_step_of_a_reward_model_can_be_built(trained, dtype) -> None:
    config = real(*TRAINED[trained], f"policy.compute_dtype={dtype}")
    assert reward_model_programs(config) == "1 traced by shapes"


def test_a_program_that_cannot_be_built_names_the_keys(monkeypatch) -> None:
    def promoted(self, inputs, *, key=None):
        low = hax.dot(inputs, self.lora_A, axis=self.wrapped.In) * self.scale
        return self.wrapped(inputs) + hax.dot(low, self.lora_B, axis=self.rank)

    # An adapter in float32 on a base in bfloat16, where nothing casts it. Of a rank of its own:
    # JAX keeps what other tests traced.
    monkeypatch.setattr(LoraLinear, "__call__", promoted)
    expected = (
        r"the canary's scores cannot be built with policy.compute_dtype=bfloat16, "
        r"policy.lora=\{'rank': 5.*scan body function carry.*change one of these keys"
    )
    with pytest.raises(ConfigError, match=expected):
        programs(real("policy.lora.rank=5", "policy.compute_dtype=bfloat16"))
