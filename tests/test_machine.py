"""The facts that bits depend on, in processes that start on one core or on all of them."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import proxy_bypass_environment

import httpx
import pytest

from marin_rl import machine
from marin_rl.machine import (
    changed_facts,
    instruction_set,
    machine_facts,
    machine_key,
    proxies,
    spare_loopback,
)

# Prints a digest of products and sums, and what the process says of itself.
PROGRAM = """
import json, hashlib
import marin_rl
from marin_rl import machine
before = machine.pool_threads()
{first}
import jax, jax.numpy as jnp, numpy as np
rng = np.random.default_rng(0)
a, b = rng.standard_normal((256, 512), np.float32), rng.standard_normal((512, 1024), np.float32)
loss = lambda b: (jax.nn.softmax(a @ b) ** 2).sum()
out = jax.jit(lambda b: (loss(b), jnp.tanh(a @ b).mean(1).sum(), jax.grad(loss)(b)))(b)
digest = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in out)).hexdigest()
print(json.dumps([digest, before, machine.running_pool_threads(), machine.machine_facts()]))
"""

# A fork that runs Python code is refused once JAX has threads, so the child moves and starts again.
ON_CORES = (
    "import os, sys; os.sched_setaffinity(0, {cores}); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def started(*, one_core: bool, first: str = "", **environment: str):
    """The program in a process that starts on one core, or on all that there are."""
    cores = os.sched_getaffinity(0)
    chosen = {min(cores)} if one_core else cores
    unset = ("NPROC", "XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", ON_CORES.format(cores=chosen), "-c", PROGRAM.format(first=first)],
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's affinity")
def test_a_process_that_starts_on_one_core_gives_the_bits_of_two():
    one, before, running, facts = started(one_core=True)
    two, *_ = started(one_core=False, NPROC="2")
    assert (before, running, facts["threads"]) == (2, 2, "2")
    assert one == two


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux's affinity")
def test_a_pool_that_is_asked_for_is_started_and_counted():
    for first, environment in (("", {"NPROC": "1"}), ("machine.request_threads(1)", {})):
        _, _, running, facts = started(one_core=True, first=first, **environment)
        assert (running, facts["threads"]) == (1, "1")
    late = "import jax; jax.devices(); assert not machine.request_threads(5)"
    _, _, running, facts = started(one_core=True, first=late)
    assert (running, facts["threads"]) == (2, "2")


def test_the_instruction_set_is_the_largest_or_what_xla_is_limited_to(monkeypatch):
    flags: Mapping[str, frozenset[str]] = {
        "SSE4_2": frozenset({"sse4_2"}),
        "AVX2": frozenset({"sse4_2", "avx", "avx2"}),
        "AVX512": frozenset({"sse4_2", "avx", "avx2", "avx512f"}),
    }
    for name, features in flags.items():
        monkeypatch.setattr(machine, "_features", lambda features=features: features)
        monkeypatch.setenv("XLA_FLAGS", "")
        assert instruction_set() == name
        monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
        assert instruction_set() == min(name, "AVX2", key=["SSE4_2", "AVX2", "AVX512"].index)


def test_facts_that_differ_are_named_and_machines_have_folders_of_their_own(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp --xla_force_host_platform_device_count=2")
    facts, key = machine_facts(), machine_key()
    assert changed_facts(facts) == {}
    assert changed_facts({})["processor"] == ("not recorded", facts["processor"])
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert changed_facts(facts) == {"xla_flags": ("", "--xla_cpu_enable_fast_math=true")}
    assert machine_key() != key


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"NO_PROXY": "a.b"}, "a.b"),  # without a proxy nothing changes
        ({"ALL_PROXY": "socks5://h:1"}, "localhost,127.0.0.1,::1"),
        ({"http_proxy": "http://h:1", "no_proxy": "a.b, localhost"}, "a.b,localhost,127.0.0.1,::1"),
        ({"HTTPS_PROXY": "http://h:1", "NO_PROXY": "*"}, "*"),
    ],
)
def test_no_request_to_this_machine_goes_through_a_proxy(variables, expected, monkeypatch):
    for kind in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{kind}_proxy", raising=False)
        monkeypatch.delenv(f"{kind.upper()}_PROXY", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # So that what is added goes with this test.
    monkeypatch.setenv("no_proxy", variables.get("no_proxy", variables.get("NO_PROXY", "")))
    spare_loopback()
    assert os.environ["no_proxy"] == (expected or "")
    if len(variables) and proxies():
        assert proxy_bypass_environment("127.0.0.1:80")
        httpx.Client(trust_env=True).close()  # socks5:// is understood


def test_a_run_behind_a_dead_proxy_reaches_its_own_server(tmp_path: Path) -> None:
    """Of HTTP and SOCKS: a request that went there would be refused."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    proxy = {"HTTP_PROXY": f"http://127.0.0.1:{port}", "ALL_PROXY": f"socks5://127.0.0.1:{port}"}
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = (
            "import marin_rl, httpx, urllib.request, urllib.error\n"
            f"url = 'http://127.0.0.1:{server.server_port}/'\n"
            "print(httpx.get(url).status_code)\n"
            "try: urllib.request.urlopen(url)\n"
            "except urllib.error.HTTPError as error: print(error.code)\n"
        )
        environment = {**os.environ, **proxy, "no_proxy": "", "NO_PROXY": ""}
        told = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
            check=True, cwd=tmp_path,
        )  # fmt: skip
        server.shutdown()
    assert told.stdout.split() == ["501", "501"]
