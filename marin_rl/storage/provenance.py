"""Code and library versions: what every manifest records of its writer."""

import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import marin_rl
import schemas

LIBRARIES = (
    "numpy", "pyarrow", "fsspec", "gcsfs", "s3fs", "jax", "jaxlib", "optax", "orbax-checkpoint",
    "marin-levanter", "transformers", "tokenizers", "openai", "reasoning-gym", "prefect",
)  # fmt: skip


@cache
def code_version() -> dict[str, str]:
    """`package`: version of marin-rl; `git`: its commit (-dirty if changed), in a checkout."""
    result = {"package": marin_rl.__version__}
    checkout = Path(marin_rl.__file__).parents[1]
    git = shutil.which("git")
    # Only a checkout of this very package counts: an installed copy inside the working tree of
    # another project would otherwise be given that project's commit.
    if git and (checkout / ".git").exists():
        command = [git, "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40"]
        answer = subprocess.run(
            [*command, "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        )
        if answer.returncode == 0:
            result["git"] = answer.stdout.strip()
    return result


@cache
def code_digest() -> str:
    """SHA-256 over the Python files of marin-rl: equal where the same code computes."""
    digest = hashlib.sha256()
    top = Path(marin_rl.__file__).parent
    for room in (top, Path(schemas.__file__).parent):
        for path in sorted(room.rglob("*.py")):
            name = f"{room.name}/{path.relative_to(room).as_posix()}"
            digest.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@cache
def library_versions() -> dict[str, str]:
    """Versions of Python and of the installed libraries that can change what is computed."""
    result = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    return result
