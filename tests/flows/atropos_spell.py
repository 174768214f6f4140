"""An environment of atropos for tests: it rewards long answers, and notes what was acknowledged.

Run by an interpreter that has `atroposlib`: trajectories' URL, policy's URL, tokenizer, journal.
"""

import asyncio
import json
import os
import sys
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig

SIZE = 4


class Spell(BaseEnv):
    """Asks for words; the score is the number of tokens."""

    name = "spell"
    journal = ""
    words = 0

    async def setup(self) -> None:
        """Load nothing."""

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Measure nothing."""

    async def get_next_item(self) -> Any:
        """Return the next word."""
        self.words += 1
        return f"w{os.getpid() % 1000}{self.words}"

    async def collect_trajectories(self, item: Any) -> Any:
        """Sample a group."""
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.chat_completion(
                messages=[{"role": "user", "content": item}],
                n=SIZE,
                max_tokens=6,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = {
            "tokens": [node.tokens for node in nodes],
            "masks": [node.masked_tokens for node in nodes],
            "inference_logprobs": [node.logprobs for node in nodes],
            "scores": [float(len(node.tokens)) for node in nodes],
        }
        return group, []

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:
        self._note("sent", scored_data)
        await super()._send_scored_data_to_api(scored_data)  # raises after three tries
        self._note("acknowledged", scored_data)

    def _note(self, what: str, group: Any) -> None:
        with open(self.journal, "a") as file:  # noqa: PTH123 - a line at once, from any process
            file.write(f"{what} {json.dumps(group['tokens'], separators=(',', ':'))}\n")
            file.flush()
            os.fsync(file.fileno())


def main() -> None:
    """Push groups until it is killed."""
    trajectories, policy, tokenizer, Spell.journal = sys.argv[1:]
    config = BaseEnvConfig(
        group_size=SIZE,
        max_num_workers=2,
        tokenizer_name=tokenizer,
        rollout_server_url=trajectories,
        use_wandb=False,
        wandb_name="spell",
        max_token_length=64,
        ensure_scores_are_not_same=False,
        steps_per_eval=0,
        max_batches_offpolicy=2,
    )
    server = APIServerConfig(
        server_type="sglang",
        base_url=policy,
        model_name="policy",
        tokenizer_name=tokenizer,
        api_key="none",
        timeout=30,
    )
    asyncio.run(Spell(config, [server]).env_manager())


if __name__ == "__main__":
    main()
