"""Scaling of training over processes: measured on this machine's CPU, and on paper beyond it.

    python bench/scaling.py                         # 1, 2 and 4 processes share 4 CPU devices
    python bench/scaling.py --paper --row 8192

Measured are seconds of training a round after the first, of the same rounds; what several processes
take longer than one with as many devices is communication, since the devices share the same cores.
On paper, weights lie over all devices (`mesh.fsdp: -1`), each of which has a row at a time, with
gradient checkpointing: weights are gathered twice in bfloat16, gradients summed once in float32,
products at 40 % of the peak, and nothing overlaps. A host's devices hand on to one another what
their links to other hosts bring, so that the slower of the two bounds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout

from machine import print_head

from marin_rl.storage.runs import Run
from marin_rl.storage.tables.metrics import read_metrics

DEVICES, ROUNDS, PEAK_SHARE = 4, 4, 0.4
MODEL = "{hidden_size: 256, layers: 4, heads: 4, kv_heads: 4, intermediate_size: 1024}"
CHANGES = (
    f"policy.model={MODEL}", f"rounds={ROUNDS}", "mesh.fsdp=-1", "evaluation.every_rounds=100",
    "rollouts.groups_per_round=4", "rollouts.group_size=8", "batching.sequences_per_step=8",
    "training.microbatch_sequences=8", "objective.advantage=grpo",
)  # fmt: skip
# bfloat16 FLOP/s; devices of a host; GB/s of a device to others of its host, and to other hosts. Of
# TPUs all are neighbours in a torus: both directions of one of its axes.
KINDS = {
    "H100": (989e12, 8, 450, 50), "MI300X": (1307e12, 8, 448, 50), "v5p": (459e12, 1, 180, 180),
    "v5e": (197e12, 1, 90, 90),
}  # fmt: skip


def main() -> None:
    """Measure, or compute, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paper", action="store_true", help="compute")
    parser.add_argument("--row", type=int, default=8192, help="tokens of a row, on paper")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    print_head()
    if options.paper:
        counts = (8, 32, 128, 256)
        print("| kind |", *(f"{count} |" for count in counts))
        for kind in KINDS:
            shares = (communication(kind, count, options.row) for count in counts)
            print(f"| {kind} |", *(f"{1 - share:.0%} |" for share in shares))
        return
    print("| processes | devices of each | s a round | efficiency | communication |")
    seconds = dict[int, float]()
    for count in options.processes:
        seconds[count] = round_s(count)
        share = seconds[options.processes[0]] / seconds[count]
        cells = count, DEVICES // count, f"{seconds[count]:.2f}", f"{share:.0%}", f"{1 - share:.0%}"
        print("|", *(f"{cell} |" for cell in cells), flush=True)


def communication(kind: str, count: int, tokens: int) -> float:
    """Share of a step that devices wait for one another; the parameters cancel out."""
    peak, of_host, within, beyond = KINDS[kind]
    compute_s = 8 * tokens / (PEAK_SHARE * peak)  # 6 operations a parameter, and 2 again
    rate = within if count <= of_host else min(within, of_host * beyond)
    exchange_s = (2 + 2 + 4) * (1 - 1 / count) / (rate * 1e9)
    return exchange_s / (exchange_s + compute_s)


def round_s(count: int) -> float:
    """Median of the seconds of training a round over `count` processes, without the first."""
    with tempfile.TemporaryDirectory() as root:
        devices = f"--devices-per-process={DEVICES // count}"
        launch = [sys.executable, "-m", "marin_rl", "launch", "-n", str(count), devices]
        changes = [f"--set={change}" for change in (*CHANGES, "run_id=scaling")]
        words = [*launch, "run", "configs/debug.yaml", "--root", root, *changes]
        variables = os.environ | {"JAX_PLATFORMS": "cpu"}
        subprocess.run(words, check=True, env=variables, stdout=subprocess.DEVNULL)
        metrics = read_metrics(Run.open(root, "scaling"), range(1, ROUNDS))
        return statistics.median(metrics["timing_s/train"].to_pylist())


if __name__ == "__main__":
    main()
