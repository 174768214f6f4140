"""TRL's side of bench/preference.py: DPOTrainer over one pass of the pairs, in float32.

Runs in its own environment (bench/peers/requirements-trl.txt). What TRL switches on by default and
ours does not have is off: gradient checkpointing, bfloat16. Nothing is saved.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from datasets import Dataset
from marks import Marks
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--step", type=int)
    options = parser.parse_args()
    rows = [json.loads(line) for line in (options.folder / "pairs.jsonl").open()]
    marks = Marks()

    class Steps(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            marks.add("step")

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as output:
        config = DPOConfig(
            output_dir=output, per_device_train_batch_size=options.step, num_train_epochs=1,
            bf16=False, gradient_checkpointing=False, learning_rate=1e-6, max_length=512,
            lr_scheduler_type="constant", save_strategy="no", report_to=[], logging_steps=1,
            use_cpu=True, seed=0,
        )  # fmt: skip
        trainer = DPOTrainer(
            model=model, args=config, train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer, callbacks=[Steps()],
        )  # fmt: skip
        marks.add("prepare")
        trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    print(json.dumps(marks.totals() | {"loss": sum(losses) / len(losses)}))


main()
