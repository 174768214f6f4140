"""TRL's side of the round benchmark: RLOOTrainer on the standard work, one JSON line per round.

Runs in its own environment (bench/peers/requirements-trl.txt). What TRL switches on by default and
the standard work does not have is off: KL to a reference, gradient checkpointing, and, unless asked
for, bfloat16. Nothing is saved. The first round is part of the output; who reads it leaves it out.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from standard_work import Work, reward
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import RLOOConfig, RLOOTrainer


class Stopwatch:
    """Wall seconds by phase, since the last `take`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of a block to `name`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Return the measured seconds, rounded to 0.1 ms, and start again."""
        taken = {name: round(value, 4) for name, value in self.seconds.items()}
        self.seconds.clear()
        return taken


class TimedTrainer(RLOOTrainer):
    """RLOOTrainer that says where its time goes; computes exactly what RLOOTrainer computes."""

    watch: Stopwatch

    def _generate_single_turn(self, *args, **kwargs):
        with self.watch.phase("generate"):
            return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        name = "forward" if torch.is_grad_enabled() else "old_logprobs"
        with self.watch.phase(name):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def training_step(self, *args, **kwargs):
        with self.watch.phase("training_step"):
            return super().training_step(*args, **kwargs)


class RoundReport(TrainerCallback):
    """Prints a line when a round, which is one optimizer step, has ended."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_train_begin(self, *_, **__) -> None:
        """Start the clocks of the first round."""
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def on_log(self, args, state, control, logs=None, **__) -> None:
        """A round ends when its numbers are logged, right after the optimizer step."""
        if logs is None or "reward" not in logs:
            return
        wall, cpu = time.perf_counter(), time.process_time()
        emit(
            event="round",
            round=state.global_step - 1,
            wall_s=round(wall - self.wall, 4),
            cpu_s=round(cpu - self.cpu, 4),
            ended_at=time.time(),
            reward=logs["reward"],
            tokens_min=logs["completions/min_length"],
            tokens_max=logs["completions/max_length"],
            tokens_mean=logs["completions/mean_length"],
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            phases_s=split_training_step(self.watch.take()),
        )
        self.wall, self.cpu = wall, cpu


def split_training_step(phases: dict[str, float]) -> dict[str, float]:
    """Take what happens inside a training step out of it: the rest is the backward pass."""
    inside = sum(phases.get(name, 0.0) for name in ("generate", "old_logprobs", "forward"))
    backward = round(phases.pop("training_step") - inside, 4)
    return {**phases, "backward_and_rest": backward}


def emit(**record) -> None:
    """One JSON line on stdout."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def rewards(completions, **_) -> list[float]:
    """The work's reward in TRL's form."""
    return [reward(None, messages[0]["content"]) for messages in completions]


def trainer_config(
    work: Work, rounds: int, microbatches: int, output: str, *, bf16: bool
) -> RLOOConfig:
    """RLOO as the standard work defines it: one step a round, no KL, nothing saved."""
    return RLOOConfig(
        output_dir=output,
        max_steps=rounds,
        per_device_train_batch_size=work.rows // microbatches,
        gradient_accumulation_steps=microbatches,
        num_generations=work.completions,
        max_completion_length=work.new_tokens,
        temperature=1.0,
        beta=0.0,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        bf16=bf16,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        seed=work.seed,
    )


def adapter_config(rank: int):
    """PEFT's adapter of all linear layers, alpha 32; None for rank 0, all parameters."""
    if not rank:
        return None
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def build_trainer(folder: Path, work: Work, config: RLOOConfig, rank: int) -> TimedTrainer:
    """The trainer over the work's model, tokenizer and prompts, with stopwatch and report."""
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    prompts = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    check_prompts(tokenizer, prompts[0], work)
    watch = Stopwatch()
    trainer = TimedTrainer(
        model=model,
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[RoundReport(watch)],
        peft_config=adapter_config(rank),
    )
    trainer.watch = watch
    trainer.remove_callback(PrinterCallback)
    return trainer


def check_prompts(tokenizer, messages: list[dict[str, str]], work: Work) -> None:
    """Raise ValueError unless a rendered prompt has as many tokens as the work says."""
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    found = len(tokenizer(rendered)["input_ids"])
    if found > work.prompt_tokens or (found < work.prompt_tokens and work.model is None):
        raise ValueError(f"expected prompts of {work.prompt_tokens} tokens, found {found}")


def main() -> None:
    """Train for some rounds; print what each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of write_work")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lora-rank", type=int, default=0, help="0: all parameters are trained")
    parser.add_argument("--bf16", action="store_true", help="mixed precision in place of fp32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    work = Work(**json.loads((options.work / "work.json").read_text()))
    with tempfile.TemporaryDirectory() as output:
        config = trainer_config(
            work, options.rounds, options.microbatches, output, bf16=options.bf16
        )
        trainer = build_trainer(options.work, work, config, options.lora_rank)
        emit(
            event="start",
            trl=trl.__version__,
            transformers=transformers.__version__,
            torch=torch.__version__,
            threads=torch.get_num_threads(),
            parameters=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
            microbatches=options.microbatches,
        )
        trainer.train()


if __name__ == "__main__":
    main()
