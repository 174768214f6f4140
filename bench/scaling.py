"""Scaling of training over processes: measured on this machine's CPU, and on paper beyond it.

    python bench/scaling.py                         # 1, 2 and 4 processes share 4 CPU devices
    python bench/scaling.py --paper --row 8192

Measured are CPU seconds of all processes in a step, after the first, and the larger of their wall
times. What several processes take more than one with as many devices is communication, since the
devices share the same cores; on busy ones wall time is waiting for others, too.
On paper, weights lie over all devices (`mesh.fsdp: -1`), each of which has a row at a time, with
gradient checkpointing: weights are gathered twice in bfloat16, gradients summed once in float32,
products at 40 % of the peak, and nothing overlaps. A host's devices hand on to one another what
their links to other hosts bring, so that the slower of the two bounds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout

import jax
import mfu
from machine import print_head

from flows.server import free_port
from marin_rl.config import MeshConfig
from marin_rl.tokenizers import character_tokenizer
from marin_rl.training.backend import DeviceBackend, Loss
from marin_rl.training.compiled_step import policy_settings, to_fixed_shape

DEVICES, STEPS, PEAK_SHARE = 4, 20, 0.4
WORK = argparse.Namespace(
    model="tiny", dtype="float32", row=256, rows=16, microbatch=16, prompt=0.125, packing="none",
    checkpointing=False,
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
    parser.add_argument("--as-process", nargs=3, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_process:
        sys.stdout.write(json.dumps(train(*options.as_process)))
        return
    print_head()
    if options.paper:
        counts = (8, 32, 128, 256)
        print("| kind |", *(f"{count} |" for count in counts))
        for kind in KINDS:
            shares = (communication(kind, count, options.row) for count in counts)
            print(f"| {kind} |", *(f"{1 - share:.0%} |" for share in shares))
        return
    print("| processes | devices of each | CPU s a step | s a step | communication |")
    first = None
    for count in options.processes:
        cpu_s, wall_s = step_s(count)
        first = first or cpu_s
        cells = count, DEVICES // count, f"{cpu_s:.2f}", f"{wall_s:.2f}", f"{1 - first / cpu_s:.0%}"
        print("|", *(f"{cell} |" for cell in cells), flush=True)


def communication(kind: str, count: int, tokens: int) -> float:
    """Share of a step that devices wait for one another; the parameters cancel out."""
    peak, of_host, within, beyond = KINDS[kind]
    compute_s = 8 * tokens / (PEAK_SHARE * peak)  # 6 operations a parameter, and 2 again
    rate = within if count <= of_host else min(within, of_host * beyond)
    exchange_s = (2 + 2 + 4) * (1 - 1 / count) / (rate * 1e9)
    return exchange_s / (exchange_s + compute_s)


def step_s(count: int) -> tuple[float, float]:
    """CPU seconds of all of `count` processes, and wall seconds of the slowest, in a step."""
    flags = f"--xla_force_host_platform_device_count={DEVICES // count}"
    flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--as-process", str(number), str(count), str(port)],
            env=variables, stdout=subprocess.PIPE, text=True,
        )
        for number in range(count)
    ]  # fmt: skip
    told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    return sum(cpu_s for cpu_s, _ in told), max(wall_s for _, wall_s in told)


def train(number: int, count: int, port: int) -> tuple[float, float]:
    """CPU and wall seconds of this process in a step, all of which begin together."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number, heartbeat_timeout_seconds=600)
    config = mfu.config_of(WORK).model_copy(update={"mesh": MeshConfig(fsdp=-1)})
    backend = DeviceBackend.of(config, character_tokenizer())
    rows, loss = to_fixed_shape(mfu.batch_of(WORK), 16, 16), Loss(settings=policy_settings(config))
    before = 0.0, 0.0
    for step in range(STEPS + 1):
        if step == 1:  # compiled
            before = time.process_time(), time.perf_counter()
        backend.forward_backward(rows, loss).result()
        backend.optim_step().result()
    return (time.process_time() - before[0]) / STEPS, (time.perf_counter() - before[1]) / STEPS


if __name__ == "__main__":
    main()
