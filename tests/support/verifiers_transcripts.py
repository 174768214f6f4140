"""Transcripts of the library `verifiers` with a server: run by the Python of its own environment.

    python verifiers_transcripts.py BASE_URL MODEL

Evaluates a single-turn and a multi-turn environment with token ids, and asks by the token path of
its newer clients. Prints one JSON object: what the library recorded of every turn.
"""

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI
from renderers.client import generate
from verifiers.types import ClientConfig

SAMPLING = {"temperature": 0.8, "max_tokens": 12, "seed": 5}
QUESTIONS = ["abc", "reverse me", "x y z"]


class Asking(vf.MultiTurnEnv):
    """Asks on, twice."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "and now?"}]


async def evaluated(kind: type, base_url: str, model: str, **options: Any) -> list[dict[str, Any]]:
    """The tokens of every turn of every rollout."""
    data = [{"question": question, "answer": question[::-1]} for question in QUESTIONS]
    rubric = vf.Rubric(funcs=[lambda completion, answer, **_: float(answer in str(completion))])
    env = kind(eval_dataset=Dataset.from_list(data), rubric=rubric, **options)
    config = ClientConfig(
        client_type="openai_chat_completions_token",
        api_base_url=base_url,
        api_key_var="MARIN_RL_API_KEY",
    )
    found = await env.evaluate(
        config,
        model,
        sampling_args=SAMPLING,
        rollouts_per_example=2,
        state_columns=["trajectory"],
        on_progress=[],
    )
    return [
        {"turn": number, "tokens": dict(step["tokens"] or {})} | {"reward": output["reward"]}
        for output in found["outputs"]
        for number, step in enumerate(output["trajectory"])
    ]


class Bare:
    """As much of a renderer as the token path asks for where the ids are there already."""

    def get_stop_token_ids(self) -> list[int]:
        return [1]

    def parse_response(self, ids: list[int], **_: Any) -> Any:
        return SimpleNamespace(
            content="", reasoning_content=None, reasoning_complete=True, tool_calls=[]
        )


async def by_tokens(base_url: str, model: str) -> dict[str, Any]:
    """Response of /inference/v1/generate, as the newer clients read it."""
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        return await generate(
            client=client,
            renderer=Bare(),
            messages=[],
            model=model,
            prompt_ids=[4, 73, 74, 75, 5],
            sampling_params={"temperature": 0.8, "max_tokens": 12, "seed": 5},
        )


async def main(base_url: str, model: str) -> None:
    found = {
        "single": await evaluated(vf.SingleTurnEnv, base_url, model),
        "multi": await evaluated(Asking, base_url, model, max_turns=3),
        "tokens": await by_tokens(base_url, model),
    }
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
