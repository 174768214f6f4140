"""Agent loop of verl that plays episodes of marin-rl.

The environment, the chat template's ids between turns, tools, limits and the reward are those of a
run of marin-rl; tokens are sampled by verl's rollout server.
"""

import json
from importlib import import_module
from typing import Any
from uuid import uuid4

from marin_rl_relay import relay

_loops: Any = import_module("verl.experimental.agent_loop.agent_loop")
AgentLoopBase: Any = _loops.AgentLoopBase


class EpisodeAgentLoop(AgentLoopBase):
    """Plays the example of a row. Raises what marin-rl says where it cannot."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Return the tokens, mask, logprobs and reward of one episode."""
        request_id = uuid4().hex  # turns of an episode share a server, and its prefix cache

        async def sample(prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
            output = await self.server_manager.generate(
                request_id=request_id,
                prompt_ids=prompt_ids,
                sampling_params={**sampling_params, "max_tokens": max_tokens},
            )
            ids, logprobs = list(output.token_ids), output.log_probs
            return {"token_ids": ids, "logprobs": None if logprobs is None else list(logprobs)}

        example = json.loads(kwargs["extra_info"]["example"])
        played = await relay().play(example, sample)
        length = self.rollout_config.response_length
        logprobs = played["response_logprobs"][:length]
        return _loops.AgentLoopOutput(
            prompt_ids=played["prompt_ids"],
            response_ids=played["response_ids"][:length],
            response_mask=played["response_mask"][:length],
            response_logprobs=logprobs if sampling_params.get("logprobs") else None,
            reward_score=played["reward"],
            num_turns=played["turns"],
            metrics=_loops.AgentLoopMetrics(),
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "finish_reason": played["finish_reason"],
                "fault": played["fault"] or "",
            },
        )
