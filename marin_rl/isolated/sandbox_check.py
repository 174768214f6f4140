"""The self-test of a sandbox: a program inside reports what it sees, before anything relies on it.

Where a wall is missing a run does not start. Leaves out the walls themselves (`sandbox`).
"""

import json
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from marin_rl.errors import ConfigError, InputError
from marin_rl.isolated.sandbox import Mode, Sandbox
from marin_rl.isolated.sandbox_command import homes, mounted

INSTALL = "apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora, RHEL)"
ALTERNATIVE = (
    "or set environment.options.sandbox: rlimits_only, with which programs that a model writes "
    "have limits and the rights of this user"
)
_TIMEOUT_S = 60.0

# What a program sees, written so that it does not fail where a wall is missing.
_PROBE = """
import json, os, resource, sys
host_file, nonce, homes, *kinds = sys.argv[1:]
def fails(call, *arguments):
    try: call(*arguments)
    except OSError: return True
    return False
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
interfaces = [line.split(":")[0].strip() for line in open("/proc/net/dev") if ":" in line]
facts = {
    "user": os.getuid(),
    "capabilities": sum(int(status["Cap" + kind], 16) for kind in ("Eff", "Prm", "Bnd")),
    "no_new_privileges": status["NoNewPrivs"].strip() == "1",
    "calls_are_filtered": status["Seccomp"].strip() == "2",
    "limits": [resource.getrlimit(kind)[0] for kind in map(int, kinds)],
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "interfaces": interfaces,
    "host_file_is_there": os.path.exists(host_file),
    "mounts": [line.split()[4] for line in open("/proc/self/mountinfo")],
    "homes": {home: sorted(os.listdir(home)) for home in json.loads(homes) if os.path.isdir(home)},
    "system_is_read_only": fails(open, "/usr/.marin-rl", "w") and fails(open, "/.marin-rl", "w"),
    "work_can_be_written": not fails(open, "probe", "w"),
}
print(nonce + json.dumps(facts))
"""


@lru_cache(maxsize=8)
def check_sandbox(mode: Mode, interpreter: str | None = None) -> str:
    """Run a program in a sandbox and compare what it sees with what it may see.

    Returns a line for people. Raises ConfigError that says what to install or to set.
    """
    needed = ["bwrap", "setpriv"] if mode == "bubblewrap" else ["prlimit"]
    if missing := [name for name in needed if shutil.which(name) is None]:
        package = INSTALL if "bwrap" in missing else "util-linux"
        raise ConfigError(
            f"the sandbox needs {', '.join(missing)}: install it, {package}; {ALTERNATIVE}"
        )
    sandbox = Sandbox(mode=mode, interpreter=interpreter)
    facts = _seen_by_a_program(sandbox)
    if mode == "rlimits_only":
        return "programs have limits, and no sandbox"
    if failed := [name for name, holds in _expected(facts, sandbox).items() if not holds]:
        raise ConfigError(
            f"the sandbox does not hold on this machine: {', '.join(failed)}; a program in it "
            f"reports {json.dumps(facts)}. {_hint()}; {ALTERNATIVE}"
        )
    filtered = "" if sandbox.filters_calls else "; system calls are not filtered on this machine"
    return f"programs run in bubblewrap, with {sandbox.python}{filtered}"


def _seen_by_a_program(sandbox: Sandbox) -> dict[str, Any]:
    """Return the report of a program in the sandbox. Raises ConfigError where it cannot run."""
    nonce = secrets.token_hex(16)
    with tempfile.NamedTemporaryFile() as host_file:
        seen = json.dumps([str(home) for home in homes()])
        arguments = [sandbox.python, "-I", "-S", "-c", _PROBE, host_file.name, nonce, seen]
        arguments += map(str, sandbox.limits.by_kind())
        try:
            result = sandbox.run(arguments, wall_s=_TIMEOUT_S)
        except InputError as error:
            raise ConfigError(f"{error}. {_hint()}; {ALTERNATIVE}") from error
    text = result.stdout.decode(errors="replace")
    if not (result.succeeded and text.startswith(nonce)):
        said = result.stderr.decode(errors="replace").strip()[-300:]
        raise ConfigError(
            f"expected that {sandbox.python} runs in the sandbox, found {result.how}: {said!r}. "
            "Set environment.options.interpreter to a Python that every user can read, such as "
            f"/usr/bin/python3; {ALTERNATIVE}"
        )
    return json.loads(text.removeprefix(nonce))


def _expected(facts: Mapping[str, Any], sandbox: Sandbox) -> dict[str, bool]:
    """Return whether each wall holds, by its name."""
    interpreter = sandbox.interpreter
    shown = [Path(place) for place in mounted(interpreter)]
    on_the_way = {*interpreter.folders, *interpreter.links}
    return {
        "user": facts["user"] != 0,
        "capabilities": facts["capabilities"] == 0,
        "no_new_privileges": facts["no_new_privileges"],
        "calls_are_filtered": facts["calls_are_filtered"] == sandbox.filters_calls,
        "limits": facts["limits"] == [soft for soft, _ in sandbox.limits.by_kind().values()],
        # itself, the first of its namespace, and no other
        "processes": facts["processes"] <= 2,
        "interfaces": facts["interfaces"] == ["lo"],
        "host_file_is_there": not facts["host_file_is_there"],
        "mounts": all(
            mount == "/" or any(Path(mount).is_relative_to(place) for place in shown)
            for mount in facts["mounts"]
        ),
        # of a home no more than what leads to the interpreter
        "homes": all(
            any(Path(place).is_relative_to(Path(home, name)) for place in on_the_way)
            for home, names in facts["homes"].items()
            for name in names
        ),
        "system_is_read_only": facts["system_is_read_only"],
        "work_can_be_written": facts["work_can_be_written"],
    }


def _hint() -> str:
    """Return what keeps bubblewrap from working, most often."""
    closed = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if closed.exists() and closed.read_text().strip() == "1":
        return "AppArmor keeps users from namespaces here: give bwrap a profile that allows them"
    return (
        "In a container allow namespaces, such as by docker run --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --cap-add SYS_ADMIN"
    )
