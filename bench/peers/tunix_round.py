"""tunix's side of the round benchmark: GRPOLearner on the standard work, one JSON line per round.

Runs in its own environment (bench/peers/requirements-tunix.txt). Advantages are RLOO's; no KL to a
reference, float32, one optimizer step a round, prompts drawn once for all samples. Nothing is
saved. The first round is part of the output; who reads it leaves it out. Its sampler pads every
completion to the longest that there may be, and so does its training.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh
from standard_work import ASSISTANT, END, PAD, SPECIAL, USER, Work, reward
from tokenizers import Tokenizer
from tunix.generate.sampler import Sampler
from tunix.models.llama3.model import Llama3, ModelConfig
from tunix.models.llama3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig


class Words:
    """The work's tokenizer, as tunix asks for one."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(self, text: str, **_: Any) -> list[int]:
        """Ids of a text that is rendered already."""
        return self._tokenizer.encode(str(text), add_special_tokens=False).ids

    def decode(self, ids: list[int], **_: Any) -> str:
        """The text of ids."""
        return self._tokenizer.decode(list(map(int, ids)))

    def bos_id(self) -> int:
        """None: tunix puts no id before a text where this is 0."""
        return 0

    def eos_id(self) -> int:
        """The end token."""
        return SPECIAL.index(END)

    def pad_id(self) -> int:
        """The padding token."""
        return SPECIAL.index(PAD)


class TimedLearner(GRPOLearner):
    """GRPOLearner that says how long a round took; computes exactly what GRPOLearner computes."""

    generate_s = 0.0
    rounds = 0
    rows_asked = 0
    lengths: np.ndarray

    def _generate_and_compute_advantage(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        example = super()._generate_and_compute_advantage(*args, **kwargs)
        jax.block_until_ready(example.advantages)
        self.generate_s = time.perf_counter() - began
        self.lengths = np.asarray(example.completion_mask).sum(axis=1)
        asked = len(args[0]["prompts"]) if args else len(kwargs["training_input"]["prompts"])
        if not len(self.lengths) == asked == self.rows_asked:
            raise ValueError(
                f"expected {self.rows_asked} completions, found {len(self.lengths)} of {asked}"
            )
        return example

    def _run_global_step(self, *args: Any, **kwargs: Any) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        super()._run_global_step(*args, **kwargs)
        jax.block_until_ready(nnx.state(self.rl_cluster.actor_trainer.model))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        emit(
            event="round",
            round=self.rounds,
            wall_s=round(wall, 4),
            cpu_s=round(cpu, 4),
            ended_at=time.time(),
            reward=float(np.mean(REWARDS)),
            tokens_min=int(self.lengths.min()),
            tokens_max=int(self.lengths.max()),
            tokens_mean=float(self.lengths.mean()),
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            phases_s={
                "generate": round(self.generate_s, 4),
                "train": round(wall - self.generate_s, 4),
            },
        )
        REWARDS.clear()
        self.rounds += 1


REWARDS: list[float] = []


def rewards(prompts: Any, completions: list[str], **_: Any) -> list[float]:
    """The work's reward in tunix's form."""
    found = [reward(None, completion) for completion in completions]
    REWARDS.extend(found)
    return found


def emit(**record: Any) -> None:
    """One JSON line on stdout."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def model_of(folder: Path, work: Work, mesh: Mesh) -> Llama3:
    """The work's model; rotary base and epsilon are those of its configuration."""
    config = json.loads((folder / "config.json").read_text())
    sizes = ModelConfig(
        num_layers=work.layers,
        vocab_size=work.vocabulary,
        embed_dim=work.hidden,
        hidden_dim=work.intermediate,
        num_heads=work.heads,
        head_dim=work.head_size,
        num_kv_heads=work.kv_heads,
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    return create_model_from_safe_tensors(str(folder), sizes, mesh=mesh, dtype=jnp.float32)


def cluster_of(folder: Path, work: Work, rounds: int, microbatches: int) -> RLCluster:
    """Actor and sampler of one set of weights on one device."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    training = RLTrainingConfig(
        actor_optimizer=optax.adamw(work.learning_rate, weight_decay=0.0),
        mini_batch_size=work.prompts,
        train_micro_batch_size=work.prompts // microbatches,
        rollout_micro_batch_size=work.prompts,
        compute_logps_micro_batch_size=work.prompts,
        eval_every_n_steps=1_000_000,
        max_steps=rounds,
    )
    rollout = RolloutConfig(
        max_tokens_to_generate=work.new_tokens,
        max_prompt_length=work.prompt_tokens,
        kv_cache_size=work.prompt_tokens + work.new_tokens,
        temperature=1.0,
        top_p=1.0,
    )
    roles = (Role.ACTOR, Role.REFERENCE, Role.ROLLOUT)
    return RLCluster(
        actor=model_of(folder / "model", work, mesh),
        tokenizer=Words(folder / "model"),
        cluster_config=ClusterConfig(
            role_to_mesh=dict.fromkeys(roles, mesh),
            training_config=training,
            rollout_config=rollout,
        ),
    )


def batches(folder: Path, work: Work, rounds: int) -> Iterator[dict[str, Any]]:
    """The prompts of each round, rendered."""
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    texts = np.array(
        [f"{USER}{row['prompt']}{ASSISTANT}" for row in rows]
    )  # lists are not repeated
    for number in range(rounds):
        yield {"prompts": texts[number * work.prompts : (number + 1) * work.prompts]}


def main() -> None:
    """Train for some rounds; print what each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of write_work")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--threads", type=int, help="nothing: JAX takes the cores there are")
    options = parser.parse_args()
    work = Work(**json.loads((options.work / "work.json").read_text()))
    first = next(batches(options.work, work, 1))["prompts"][0]
    found = len(Words(options.work / "model").encode(first))
    if found != work.prompt_tokens:
        raise ValueError(f"expected prompts of {work.prompt_tokens} tokens, found {found}")
    learner = TimedLearner(
        rl_cluster=cluster_of(options.work, work, options.rounds, options.microbatches),
        algo_config=GRPOConfig(
            advantage_estimator="rloo",
            num_generations=work.completions,
            num_iterations=1,
            beta=0.0,
        ),
        reward_fns=rewards,
    )
    learner.rows_asked = work.rows
    emit(
        event="start",
        tunix=version("google-tunix"),
        jax=jax.__version__,
        sampler=Sampler.__name__,
        microbatches=options.microbatches,
    )
    learner.train(list(batches(options.work, work, options.rounds)))


if __name__ == "__main__":
    main()
