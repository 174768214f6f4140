"""Checks of a folder for verl by verl's own classes; run by an interpreter that has verl.

Arguments: the folder, the ways that members go (JSON), the completions to score (JSON), and a file
of exported rollouts, if any. Prints a line of JSON: what verl's configuration, dataset, reward
manager and agent loop made of them.
"""

import asyncio
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config
from verl.utils.dataset.rl_dataset import collate_fn, get_dataset_class
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.replica import TokenOutput


class ScriptedServer:
    """Rollout server of verl's interface, whose turns are those of a script."""

    def __init__(self, tokenizer: Any, ways: list[list[str]]) -> None:
        self._tokenizer, self._ways = tokenizer, ways
        self._turns: dict[str, list[str]] = {}
        self._members: dict[str, int] = defaultdict(int)
        self.limits: list[int] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Answer with the next turn of the member that asks."""
        if request_id not in self._turns:
            key = str(prompt_ids)
            self._turns[request_id] = list(self._ways[self._members[key] % len(self._ways)])
            self._members[key] += 1
        self.limits.append(sampling_params["max_tokens"])
        said = self._turns[request_id].pop(0)
        ids = [
            *self._tokenizer.encode(said, add_special_tokens=False),
            self._tokenizer.eos_token_id,
        ][: sampling_params["max_tokens"]]
        return TokenOutput(token_ids=ids, log_probs=[-1.0] * len(ids))


def main() -> None:
    """Check, and print."""
    folder, ways, completions = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    with initialize_config_dir(folder, version_base=None):
        config = compose("verl")
    validate_config(config, need_reference_policy(config), need_critic(config))
    tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)
    dataset_class = get_dataset_class(config.data)
    found: dict[str, Any] = {"dataset": dataset_class.__name__}
    for name in ("train", "val"):
        dataset = dataset_class(config.data[f"{name}_files"], tokenizer, config.data)
        found[name] = len(dataset)
    dataset = dataset_class(config.data.train_files, tokenizer, config.data)
    rows = [dataset[index] for index in range(config.data.train_batch_size)]
    sys.path.insert(0, config.ray_kwargs.ray_init.runtime_env.env_vars.PYTHONPATH)
    batch = DataProto.from_single_dict(collate_fn(rows))
    batch = batch.repeat(repeat_times=config.actor_rollout_ref.rollout.n, interleave=True)
    found["rewards"] = asyncio.run(_scored(config, tokenizer, rows, completions))
    if config.actor_rollout_ref.rollout.agent.agent_loop_config_path:
        server = ScriptedServer(tokenizer, ways)
        found["episodes"] = asyncio.run(_played(config, server, batch))
        found["limits"] = sorted(set(server.limits))
    for path in sys.argv[4:]:
        lines = Path(path).read_text().splitlines()
        found["outputs"] = [_output(json.loads(line)) for line in lines]
    print(json.dumps(found))


def _output(line: dict[str, Any]) -> list[float]:
    """Tokens that are trained on, and the reward, as verl's own record has them."""
    record = AgentLoopOutput.model_validate(line).as_dict()
    assert len(record["responses"]) == len(record["rollout_log_probs"])
    return [int(record["response_mask"].sum()), float(record["rm_scores"].sum())]


async def _played(config: Any, server: ScriptedServer, batch: Any) -> list[dict[str, Any]]:
    worker = AgentLoopWorker(config, llm_client=server)
    made = await worker.generate_sequences(batch)
    episodes = []
    for index in range(len(made)):
        item = made[index].batch
        length = item["prompts"].shape[-1]
        prompt = item["attention_mask"][:length].bool()
        response = item["attention_mask"][length:].bool()
        episodes.append(
            {
                "ids": item["input_ids"][torch.cat([prompt, response])].tolist(),
                "mask": [0] * int(prompt.sum()) + item["response_mask"][response].tolist(),
                "logprobs": item["rollout_log_probs"][response].tolist(),
                "reward": float(item["rm_scores"].sum()),
                "finish_reason": str(made[index].non_tensor_batch["finish_reason"]),
            }
        )
    return episodes


async def _scored(
    config: Any, tokenizer: Any, rows: list[Any], completions: list[str]
) -> list[list[float]]:
    manager = load_reward_manager(config, tokenizer)
    rewards = []
    for row in rows:
        scores = []
        for text in completions:
            ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
            tensors = {
                "responses": torch.tensor([ids]),
                "attention_mask": torch.ones((1, len(ids)), dtype=torch.long),
            }
            columns = ("data_source", "reward_model", "extra_info")
            item = DataProto.from_single_dict(
                tensors | {k: v for k, v in collate_fn([row]).items() if k in columns}
            )
            scores.append((await manager.run_single(item))["reward_score"])
        rewards.append(scores)
    return rewards


if __name__ == "__main__":
    main()
