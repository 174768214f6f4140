"""The class of client that asks endpoints as `inference.route` says.

`template` renders and decodes for the routes of ids. Leaves out clients of runs whose weights
change in flight (`rollouts.in_flight`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from marin_rl.config import InferenceConfig
from marin_rl.inference.client.chat_client import NO_OPTIONS
from marin_rl.inference.client.fleet_client import FleetClient
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.sglang_client import SGLangClient
from marin_rl.inference.client.tokens_client import Ids
from marin_rl.inference.client.vllm_client import VllmClient, VllmFleetClient
from marin_rl.types import Message


@runtime_checkable
class Template(Protocol):
    """A policy's chat template and tokenizer."""

    def prompt(
        self,
        dialogue: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> Ids:
        """Return the ids of a dialogue and the opening of the model's next turn."""
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of sampled ids."""
        ...


def client_of(inference: InferenceConfig, template: Template) -> Callable[..., PolicyClient]:
    """The class of client that a run's endpoints are asked by."""
    if inference.route == "sglang":
        return partial(SGLangClient, render=template.prompt)
    if inference.route == "vllm_generate":
        return partial(VllmClient, render=template.prompt, text_of=template.text)
    return PolicyClient


def fleet_client_of(inference: InferenceConfig, template: Template) -> Callable[..., FleetClient]:
    """The class of client that a run's fleet is asked by."""
    if inference.route == "vllm_generate":
        return partial(VllmFleetClient, render=template.prompt, text_of=template.text)
    return FleetClient
