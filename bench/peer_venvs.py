"""The environments of the peers: one for each, since their pins exclude each other.

Owns where they lie and how they are made. Leaves out what runs in them (`peers/`,
`engine_sides.py`).
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BENCH = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another library: `name` on the tables, `key` in the names of its files."""

    name: str
    key: str

    @property
    def venv(self) -> Path:
        """Its environment."""
        return BENCH / f".venv-{self.key}"

    @property
    def requirements(self) -> Path:
        """The pins of its environment."""
        return BENCH / "peers" / f"requirements-{self.key}.txt"

    @property
    def python(self) -> Path:
        """Its interpreter, where it is installed."""
        return self.venv / "bin/python"


TRL = Peer(name="TRL", key="trl")
TUNIX = Peer(name="tunix", key="tunix")
# Hugging Face's generate and CTranslate2; TRL wants another transformers.
HF = Peer(name="Hugging Face and CTranslate2", key="hf")


def install(peer: Peer) -> None:
    """Create a peer's environment from its pins, torch first; a no-op where that is done."""
    stamp, pins = peer.venv / ".installed", peer.requirements.read_text()
    if stamp.is_file() and stamp.read_text() == pins:
        return
    shutil.rmtree(peer.venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", peer.venv], check=True)
    pip = [peer.python, "-m", "pip", "install", "--disable-pip-version-check", "-qq"]
    for torch in (pin for pin in pins.splitlines() if pin.startswith("torch==")):
        subprocess.run([*pip, torch], check=True)
    subprocess.run([*pip, "-r", peer.requirements], check=True)
    stamp.write_text(pins)
