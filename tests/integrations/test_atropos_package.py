"""Groups of atropos, as its package reads those that a run exports."""

import json
import subprocess
from pathlib import Path

import pytest
from integrations.libraries import interpreter_with
from integrations.library_runs import configuration, following
from support.scripted_policies import record

from marin_rl.integrations.exchange import export_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

READ_GROUPS = """
import json, sys
from atroposlib.api.server import ScoredData

found = []
for line in open(sys.argv[1]):
    group = ScoredData.model_validate_json(line)
    found.append([group.tokens, group.scores, [[m != -100 for m in row] for row in group.masks]])
print(json.dumps(found))
"""


def test_atropos_reads_rollouts_as_its_own_groups(tmp_path: Path, interpreters: Path):
    config = configuration(
        tmp_path, None, "game", game="guess", size=8, turns_max=3
    )  # the environment makes no difference: the records are those of any run
    recorded, groups = record(config, following("1 2 3", "4 5 6", "7 0 1"))
    export_rollouts(recorded, "atropos", tmp_path / "groups.jsonl")
    python = interpreter_with(interpreters / "atropos", "atroposlib==0.4.0")
    done = subprocess.run(
        [python, "-c", READ_GROUPS, tmp_path / "groups.jsonl"],
        capture_output=True,
        text=True,
        check=True,
    )
    ours = [
        [
            [rollout.token_ids.tolist() for rollout in group.rollouts],
            [rollout.reward for rollout in group.rollouts],
            [(rollout.loss_mask == 1).tolist() for rollout in group.rollouts],
        ]
        for group in groups
    ]
    assert json.loads(done.stdout.splitlines()[-1]) == ours
