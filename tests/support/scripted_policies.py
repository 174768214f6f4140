"""Policies that follow a script, for dialogues with tools: exact ids of a real chat template."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import yaml
from support.templates import QWEN
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from marin_rl.chat_templates import ChatTemplate, Conversation
from marin_rl.config import Config, load_config
from marin_rl.environments.checks import environment_of
from marin_rl.inference.client.answers import ChatAnswer, Completion
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.protocol import ChatRequest, message_body, served_model_id
from marin_rl.progress import ProgressEvent
from marin_rl.rollouts.generate import SamplingJob, sample_groups, shard_requests
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.rollouts import commit_shard, seal_round
from marin_rl.tokenizers import tokenizer_for
from marin_rl.types import Message, RolloutGroup, ServedPolicy, SlotRef

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
DIGEST = "ab" * 32
MODEL = served_model_id("policy", 0, DIGEST)
MODEL_SIZES = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 2, "intermediate_size": 64}

# Text of a turn, from the messages so far and the number of the member.
Script = Callable[[Sequence[Message], int], str]


def tokenizer_of(template: str, end: str) -> PreTrainedTokenizerFast:
    """Bytes and special tokens: no token reaches over a boundary of texts."""
    special = ["<|pad|>", end, *ROLES, "<|im_start|>", "[INST]", "[/INST]"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *letters])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|pad|>",
        pad_token="<|pad|>",
        eos_token=end,
        additional_special_tokens=special[2:],
    )
    made.chat_template = template
    return made


def call(name: str, **arguments: Any) -> str:
    """Text of a call as Qwen's template writes it."""
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


class ScriptedClient(PolicyClient):
    """A client of a policy that says what its script says; ids are those of its tokenizer."""

    def __init__(self, config: Config, script: Script) -> None:
        super().__init__(endpoints=served().endpoints, model=MODEL)
        self._tokenizer, self._script = tokenizer_for(config.policy), script
        self.prompts: list[str] = []

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Answer with turns of the script."""
        prompt_ids, messages = request.prompt_ids, request.messages
        if prompt_ids is None:
            template = ChatTemplate.of(self._tokenizer, tools=bool(request.tools))
            bodies = [message_body(message) for message in messages]
            offered = [dict(tool) for tool in request.tools] or None
            conversation = Conversation(messages=bodies, tools=offered, opening=True)
            prompt_ids = np.array(self._encoded(template.render(conversation).text), np.int32)
        self.prompts.append(str(self._tokenizer.decode(prompt_ids)))
        said = [self._script(messages, index) for index in range(request.n)]
        return ChatAnswer(
            model=MODEL, prompt_token_ids=prompt_ids, completions=tuple(map(self._sampled, said))
        )

    def _sampled(self, text: str) -> Completion:
        end = self._tokenizer.eos_token_id
        ids = np.array([*self._encoded(text), end], np.int32)
        logprobs = np.full(len(ids), -1.0, np.float32)
        return Completion(text=text, token_ids=ids, logprobs=logprobs, finish_reason="stop")

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def served() -> ServedPolicy:
    """The policy that the scripted client stands for."""
    return ServedPolicy(
        endpoints=("http://127.0.0.1:1/v1",),
        model=MODEL,
        weight_version=0,
        parameters_digest=DIGEST,
        tokenizer_digest="t",
        chat_template_digest="c",
        checkpoint=SlotRef(slot="checkpoints/round-00000", sha256="5" * 64),
    )


def play(config: Config, script: Script) -> list[RolloutGroup]:
    """Sample and score round 0 with a scripted policy."""
    run, environment = Run.create_or_open(config), environment_of(config)
    job = SamplingJob(
        config=config,
        policy=served(),
        environment=environment,
        progress=ProgressEvent(run_id=config.run_id, stage="generate", round=0),
    )
    requests = shard_requests(run, 0, 0, environment)
    return asyncio.run(sample_groups(job, requests, ScriptedClient(config, script)))


def record(config: Config, script: Script) -> tuple[Run, list[RolloutGroup]]:
    """Sample round 0 with a scripted policy, and seal it."""
    groups, run, policy = play(config, script), Run.create_or_open(config), served()
    ref = commit_shard(run, 0, 0, groups, "f", policy)
    seal_round(run, 0, [ref], [policy.checkpoint])
    return run, groups


def write_tokenizer(folder: Path, template: str, end: str) -> Path:
    """Write a tokenizer folder that a policy can name."""
    tokenizer_of(template, end).save_pretrained(folder)
    return folder


def tool_run(
    folder: Path, environment: Any, groups: int, size: int, context_length: int = 4096
) -> Config:
    """A run of one round of a tiny policy whose chat template has tools."""
    tokenizer = write_tokenizer(folder / "tokenizer", QWEN, "<|im_end|>")
    values = {
        "run_id": "tools",
        "rounds": 1,
        "root": str(folder / "runs"),
        "policy": {
            "init": "random",
            "tokenizer": str(tokenizer),
            "context_length": context_length,
            "model": MODEL_SIZES,
        },
        "environment": environment,
        "batching": {"length_buckets": [context_length]},
        "rollouts": {"groups_per_round": groups, "group_size": size, "shards_per_round": 1},
        "sampling": {"max_tokens": context_length // 4},
        "evaluation": {"examples": 1},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return load_config(folder / "run.yaml")
