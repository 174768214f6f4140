"""The head of every benchmark's output: processor, instruction set, cores, load.

Figures of two machines, or of two instruction sets on one, are not comparable, so each script
prints this line first. Written for Linux; elsewhere the processor's name is Python's, and the
instruction set is unknown.
"""

import os
import platform
import re
from pathlib import Path
from typing import Any

# XLA's names of instruction sets, from the smallest, and the flags of Linux that each needs.
INSTRUCTION_SETS = {
    "SSE4_2": {"sse4_2"},
    "AVX": {"avx"},
    "AVX2": {"avx2", "fma"},
    "AVX512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"},
    "AVX512_VNNI": {"avx512_vnni"},
    "AVX512_BF16": {"avx512_bf16"},
    "AMX": {"amx_tile", "amx_bf16", "amx_int8"},
    "AMX_FP16": {"amx_fp16"},
}
CPUINFO = Path("/proc/cpuinfo")


def machine() -> dict[str, Any]:
    """Processor, instruction sets of the processor and of XLA, cores of this process, load."""
    processor, has = _processor()
    return {
        "processor": processor,
        "instructions": has,
        "xla_instructions": _xla_instructions(has, os.environ.get("XLA_FLAGS", "")),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cores_of_machine": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
    }


def head() -> str:
    """`machine()` as one line."""
    found = machine()
    return (
        f"machine: {found['processor']}, {found['instructions']}, XLA compiles for "
        f"{found['xla_instructions']}, {found['cores'] or 'all'} of {found['cores_of_machine']} "
        f"cores, load {found['load_average']}"
    )


def print_head() -> None:
    """Print `head()` at once, before what a script starts prints anything."""
    print(head(), flush=True)


def _processor() -> tuple[str, str]:
    """Name and largest instruction set of the processor."""
    if not CPUINFO.is_file():
        return platform.processor() or platform.machine(), "instruction set unknown"
    fields = dict(re.findall(r"^([^\t:]+?)\s*:[ ]?(.*)$", CPUINFO.read_text(), re.MULTILINE))
    flags = set(fields.get("flags", "").split())
    names = [name for name, needed in INSTRUCTION_SETS.items() if needed <= flags]
    numbers = [
        f"{key.split()[-1]} {fields[key]}" for key in ("cpu family", "model") if key in fields
    ]
    name = fields.get("model name", platform.machine())
    return f"{name} ({', '.join(numbers)})", names[-1] if names else "instruction set unknown"


def _xla_instructions(processor: str, xla_flags: str) -> str:
    """The set that XLA compiles for: the processor's, or a smaller one that XLA_FLAGS asks for.

    The flag limits the code that XLA itself compiles. The kernels of YNNPACK, which multiply
    matrices, are chosen by the processor alone.
    """
    limit = re.findall(r"--xla_cpu_max_isa=(\w+)", xla_flags)
    order = list(INSTRUCTION_SETS)
    if not limit or processor not in order or limit[-1].upper() not in order:
        return processor
    return min(processor, limit[-1].upper(), key=order.index)
