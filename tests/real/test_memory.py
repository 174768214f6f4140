"""Peak of memory and files of rounds with the real model, against the plan."""

import json
import os
import subprocess
import sys

import pytest

from marin_rl.config import load_config
from marin_rl.planning import plan

pytestmark = pytest.mark.slow

# Microbatches of 4 rows, so that a round fits into 8 GB. Two rounds: the second step begins beside
# what sampling left in memory.
CONFIG = """
run_id: peak
rounds: 2
policy: {{init: hf, hf_path: {folder}, context_length: 96{adapter}}}
environment: {{name: echo}}
sampling: {{max_tokens: {tokens}}}
rollouts: {{groups_per_round: {groups}, group_size: 4}}
inference: {{engine: {{slots: 8}}}}
filters: {{zero_signal: false}}
batching: {{{rows}}}
training: {{microbatch_sequences: {count}}}
evaluation: {{every_rounds: 10, examples: 1}}
"""
TOLERANCE = 0.15
PADDED = "length_buckets: [96]"
PACKED = "packing: shared_prompt, row_tokens: 256"


@pytest.mark.parametrize(
    ("adapter", "count", "rows"),
    [("", 4, PADDED), ("", 4, PACKED), (", lora: {rank: 8}", 8, PADDED)],
)
def test_the_plan_of_rounds_is_what_they_take(real_model, tmp_path, adapter, count, rows):
    file = tmp_path / "peak.yaml"
    # Padded rows are of one length however short; packed ones are to fill a microbatch.
    groups, tokens = (4, 8) if rows == PADDED else (8, 24)
    settings = {"adapter": adapter, "count": count, "rows": rows, "tokens": tokens}
    file.write_text(CONFIG.format(folder=real_model, groups=groups, **settings))
    planned = plan(load_config(file, [f"root={tmp_path}/runs"]))
    command = [sys.executable, "-m", "marin_rl", "run", str(file), "--root", f"{tmp_path}/runs"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    # In a process of its own, whose peak the kernel knows.
    program = (
        "import json, resource, subprocess, sys;"
        "code = subprocess.run(sys.argv[1:], stdout=sys.stderr).returncode;"
        "peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024;"
        "print(json.dumps([code, peak]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, *command],
        env=environment, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    code, peak = json.loads(ended.stdout)
    assert code == 0
    assert planned.peak_bytes == pytest.approx(peak, rel=TOLERANCE), planned.peak_bytes / peak
    checkpoints = sum(
        each.stat().st_size
        for each in (tmp_path / "runs/peak/checkpoints").rglob("*")
        if each.is_file()
    )
    assert planned.checkpoint_disk_bytes == pytest.approx(checkpoints, rel=0.01)
