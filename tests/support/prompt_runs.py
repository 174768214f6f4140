"""Runs on a file of prompts with a reward of tests/support, whole and killed."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from support.cases import printed_seed
from support.fault_injection import inject_faults
from support.faults import NamedOperations, Outcome, outcome
from support.flow_runs import DEBUG, ForkServer

from flows.rl_loop import start
from marin_rl.config import Config, parse_config
from marin_rl.config.files import pin_code
from marin_rl.config.loading import override


def prompt_run(
    root: Path,
    prompts: Iterable[Mapping[str, str]],
    reward: str,
    sections: Mapping[str, Any],
    overrides: Sequence[str] = (),
) -> Config:
    """A run on these prompts; `reward` is FILE.py:function below tests/support.

    A process that is started again finds that below the folder that it is started in.
    """
    root.mkdir(parents=True, exist_ok=True)
    (root / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in prompts))
    tree = yaml.safe_load(DEBUG.read_text())
    options = {"path": str(root / "prompts.jsonl"), "reward": f"tests/support/{reward}"}
    tree |= {"root": str(root / "runs"), "environment": {"name": "chat", "options": options}}
    return parse_config(pin_code(override({**tree, **sections}, overrides), Path()), "prompts")


def played_whole(config: Config) -> tuple[Config, Outcome, list[str]]:
    """The run played to its end, its outcome, and the names of its operations."""
    operations = NamedOperations(config.root)
    with inject_faults(operations):
        start(config)
    return config, outcome(config), operations.names.seen


def killed_thrice(
    names: Sequence[str], fork_server: ForkServer, config: Config, kind: str
) -> Outcome:
    """Outcome of a run that is killed at three operations that create something, and goes on."""
    creates = [name for name in names if name.startswith("create ") and ".probe" not in name]
    faults = dict.fromkeys(random.Random(printed_seed()).sample(creates, 3), kind)
    starts, left = fork_server.run_until_all_came(config, faults)
    assert starts > 1, left
    return outcome(config)
