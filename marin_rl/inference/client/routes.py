"""The client that asks endpoints as `inference.route` says."""

from collections.abc import Callable
from functools import partial

from marin_rl.config import InferenceConfig
from marin_rl.inference.client.dialects import Template
from marin_rl.inference.client.policy_client import PolicyClient
from marin_rl.inference.client.sglang import SGLangDialect
from marin_rl.inference.client.vllm import VllmDialect


def client_of(inference: InferenceConfig, template: Template) -> Callable[..., PolicyClient]:
    """The client of a run's endpoints; `template` renders and decodes for the routes of ids."""
    if inference.route == "sglang":
        return partial(PolicyClient, dialect=SGLangDialect(template))
    if inference.route == "vllm_generate":
        return partial(PolicyClient, dialect=VllmDialect(template))
    return PolicyClient
