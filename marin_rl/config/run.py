"""A whole run: every section, checked to fit together, as read from a file or a mapping.

Leaves out the sections themselves (`sections`), and what must fit across them (`checks`).
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import model_validator

from marin_rl.config.checks import CHECKS
from marin_rl.config.sampling import SamplingConfig
from marin_rl.config.sections import RunSections


class Config(RunSections):
    """A whole run: what is trained, on what, how, and for how many rounds."""

    @classmethod
    def load(
        cls,
        source: str | Path | Mapping[str, Any],
        overrides: Sequence[str] | Mapping[str, Any] = (),
    ) -> "Config":
        """Read a configuration and validate it.

        Args:
            source: a YAML file, or a nested mapping as a YAML file holds it. Files that a mapping
                names are relative to the current folder, those of a YAML file to its own.
            overrides: values by dotted key, `{"training.learning_rate": 1e-4}`, or as the command
                line takes them, `["training.learning_rate=1e-4"]`.

        Raises:
            ConfigError: naming every wrong key, with the nearest known one.
        """
        # By name, for loading.py is built on this module.
        loading = import_module("marin_rl.config.loading")
        changes = loading.as_overrides(overrides)
        load = loading.load_tree if isinstance(source, Mapping) else loading.load_config
        return load(source, changes)

    @model_validator(mode="before")
    @classmethod
    def _defaults_follow(cls, data: Any) -> Any:
        """Give a short context a default of sampling.max_tokens that leaves room for a prompt."""
        if not isinstance(data, Mapping):
            return data
        policy, sampling = data.get("policy"), data.get("sampling", {})
        context = policy.get("context_length") if isinstance(policy, Mapping) else None
        chosen = not isinstance(sampling, Mapping) or "max_tokens" in sampling
        default = SamplingConfig.model_fields["max_tokens"].default
        if chosen or not isinstance(context, int) or not 1 < context <= default:
            return data
        return {**data, "sampling": {**sampling, "max_tokens": context // 2}}

    @model_validator(mode="after")
    def _sections_fit(self) -> "Config":
        for check in CHECKS:
            check(self)
        return self
