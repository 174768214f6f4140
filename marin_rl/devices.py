"""Start of JAX on the devices of this machine, and one error that says why it cannot.

JAX names a library and a version, or goes on with the CPU where a GPU's driver is too old: a run
would then take days without a word. Leaves out errors of programs that run (`machine`) and what a
run needs of memory (`planning`).
"""

import re
import shutil
import subprocess
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from marin_rl.errors import DeviceUnfit
from marin_rl.machine import CHOSEN_PLATFORMS, computes_on_host

# JAX's packages for NVIDIA GPUs.
PLUGINS = ("xla_cuda12", "xla_cuda13")

# Ampere, the first generation that multiplies in bfloat16.
BFLOAT16_CAPABILITY = 8.0

# Words of JAX, of its CUDA plugin and of the driver, and what to do about each.
_CAUSES = (
    (
        r"DNN library initialization failed",
        "the driver is older than JAX's plugin needs, or another process has the card's memory; "
        "the lines above say which",
    ),
    (
        r"driver version is insufficient|INSUFFICIENT_DRIVER|SYSTEM_DRIVER_MISMATCH|"
        r"UNSUPPORTED_PTX_VERSION|COMPAT_NOT_SUPPORTED|[Oo]utdated|built against",
        "the NVIDIA driver or a CUDA library is older than JAX's plugin needs: update the driver, "
        "or install the jax plugin for its CUDA version, without other CUDA libraries in "
        "LD_LIBRARY_PATH",
    ),
    (
        r"DEVICE_UNAVAILABLE|busy or unavailable|OUT_OF_MEMORY|[Oo]ut of memory|"
        r"no supported devices found",
        "another process holds the card or its memory: end it, or choose another card by "
        "CUDA_VISIBLE_DEVICES",
    ),
)


def start_devices(dtype: DTypeLike) -> list[Any]:
    """The devices that JAX computes on, started if they were not.

    Raises DeviceUnfit where a GPU that is there cannot be used, or does not compute in `dtype`.
    """
    try:
        devices = jax.devices()
        if devices[0].platform == "gpu":  # cuDNN and the driver meet in the first program
            jax.block_until_ready(jax.numpy.zeros(1) + 1)
    except (RuntimeError, AssertionError) as error:  # of a platform without plugin, without words
        raise DeviceUnfit(explained(str(error) or "JAX has no plugin for it")) from error
    if devices[0].platform == "cpu" and not computes_on_host() and _has_plugin():
        raise DeviceUnfit(explained("", fell_back=True))
    check_dtype(devices[0], dtype)
    return devices


def _has_plugin() -> bool:
    return any(find_spec(f"jax_plugins.{name}") is not None for name in PLUGINS)


def explained(reason: str, *, fell_back: bool = False) -> str:
    """The sentence for a device that did not start, from what JAX said of it."""
    remedy = "`nvidia-smi` says whether the driver sees the card"
    for pattern, found in _CAUSES:
        if re.search(pattern, reason):
            remedy = found
            break
    if fell_back:
        reason = "it went on with the CPU, and its warning above says why"
        remedy = _CAUSES[1][1]
    said = " ".join(reason.split())
    others = _holders()
    holders = f"; the card is in use by the processes {', '.join(others)}" if others else ""
    return (
        f"JAX could not start the GPU of this machine ({said[:400]}): {remedy}{holders}. "
        f"{CHOSEN_PLATFORMS}=cpu computes on the CPU"
    )


def check_dtype(device: Any, dtype: DTypeLike) -> None:
    """Raise DeviceUnfit for bfloat16 on a card of a generation without it."""
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability is None or np.dtype(dtype).itemsize != 2:
        return
    if float(capability) < BFLOAT16_CAPABILITY:
        raise DeviceUnfit(
            f"policy.compute_dtype is bfloat16, which takes a card of compute capability "
            f"{BFLOAT16_CAPABILITY} or later, found {device.device_kind} of {capability}: set it "
            "to float32"
        )


def _holders() -> list[str]:
    """Processes that have memory of a GPU, as the driver's own program lists them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip().isdigit()]
