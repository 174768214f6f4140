"""Batch invariance: a sequence has the same bits whatever is computed next to it.

Programs of fixed shapes make that likely, and no more: which row of a product is added up in which
order is the matrix library's choice, by instruction set and shape. So the engine proves it on the
machine at hand, with the programs and shapes that it will use, and uses only what is proven. Owns
what is proven, and the record of it next to the compiled programs. Leaves out the trials
(`invariance_trials`), and what an engine does without a proof (`execution_plan`).
"""

import hashlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from marin_rl.compilation import programs_folder
from marin_rl.inference.kv_cache import Cache, empty_cache
from marin_rl.inference.weights import DecoderSpec
from marin_rl.machine import machine_facts

FORMAT = "marin-rl/batch-invariance"

# What is proven, and how: a record of another version is proven again.
VERSION = 2

# The same of products with adapters, for engines that have room for some.
ADAPTERS_VERSION = 2

_log = logging.getLogger(__name__)
_known: dict[Path | str, "Invariance"] = {}  # by file; by name where programs have no folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariance:
    """Equalities that hold bit by bit on this machine for one engine's shapes.

    `slots`: a sequence in any slot of a lane, alone or among others. `prompts`: a prompt in any row
    of a prefill, alone or among others. `shared`: a prompt's cache read once for several slots, or
    by each on its own. `continued`: a position that is decoded, or computed in a piece of a prompt
    however that is cut; only engines with a prefix cache try it, and where it fails try pieces
    of one position each: `continued_singly`. `adapters`: a sequence on an adapter, whatever is in
    the other rows of the bank; only engines with room for adapters try it. `few_adapters`: the
    same, computed with half of the bank or with all of it.
    """

    slots: bool
    prompts: bool
    shared: bool
    continued: bool = False
    continued_singly: bool = False
    adapters: bool = False
    few_adapters: bool = False


# On a mesh nothing is proven, so nothing is promised.
UNPROVEN = Invariance(slots=False, prompts=False, shared=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Shapes and types that decide the compiled programs of an engine on one device."""

    spec: DecoderSpec
    slots: int  # of a lane
    context_length: int
    chunk_steps: int
    prefill_rows: int
    sharing: bool
    dtype: str
    prefix_cache: bool = False
    adapters: int = 0
    adapter_rank: int = 0
    own: str = ""  # layout of weights that lie quantised, and of the model's own adapter

    @property
    def cache(self) -> Cache:
        """Shapes of a lane's cache."""
        dtype = np.dtype(self.dtype)
        make = lambda: empty_cache(self.spec, self.slots, self.context_length, dtype)
        return jax.eval_shape(make)


def invariance_of(shapes: Shapes, prove: Callable[[], Invariance]) -> Invariance:
    """The recorded outcome for such programs on this machine, or that of `prove`, which is kept.

    A record that cannot be read is proven again; where none can be written, this process keeps it.
    """
    facts = _facts(shapes)
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    folder = programs_folder()
    file = None if folder is None else folder / "batch-invariance" / f"{name[:32]}.json"
    place = file or name
    recorded = _known.get(place) or (_read(file, facts) if file else None)
    if recorded is None:
        started = time.monotonic()
        recorded = prove()
        if file is not None:
            _write(file, facts, recorded, time.monotonic() - started)
    _known[place] = recorded
    return recorded


def recorded_proofs() -> list[tuple[Mapping[str, Any], Invariance]]:
    """Proofs that are kept for this machine: facts and shapes, and the outcome."""
    folder = programs_folder()
    files = sorted((folder / "batch-invariance").glob("*.json")) if folder else []
    records = [_parsed(file) for file in files]
    return [record for record in records if record is not None]


def _facts(shapes: Shapes) -> dict[str, Any]:
    """Facts that an outcome depends on, as JSON types."""
    shape_facts = asdict(shapes)
    if not shapes.adapters:  # as records of engines without adapters always were
        del shape_facts["adapters"], shape_facts["adapter_rank"]
    if not shapes.own:
        del shape_facts["own"]
    adapters = {"adapters_version": ADAPTERS_VERSION} if shapes.adapters else {}
    # either decides which instructions a product becomes
    settings = "jax_disable_most_optimizations", "jax_default_matmul_precision"
    return {
        "version": VERSION,
        **adapters,
        "machine": machine_facts(),
        "libraries": {name: version(name) for name in ("jax", "jaxlib")},
        "settings": {name: str(jax.config.values[name]) for name in settings},
        "shapes": shape_facts,
    }


def _read(file: Path, facts: Mapping[str, Any]) -> Invariance | None:
    if not file.exists():
        return None
    record = _parsed(file)
    if record is None or record[0] != facts:
        _log.warning("%s is no record of these programs: they are proven again", file)
        return None
    return record[1]


def _parsed(file: Path) -> tuple[Mapping[str, Any], Invariance] | None:
    """The facts and the outcome that a file records, or None where it is not such a record."""
    try:
        record = json.loads(file.read_bytes())
        names = {item.name for item in fields(Invariance)}
        # records of engines without adapters do not have these
        absent = {"adapters": False, "few_adapters": False}
        outcome, facts = absent | record["equal"], record["facts"]
        valid = record["format"] == FORMAT and isinstance(facts, dict) and set(outcome) == names
        if valid and all(type(value) is bool for value in outcome.values()):
            return facts, Invariance(**outcome)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        pass  # whatever is wrong with it, the proof is made again
    return None


def _write(file: Path, facts: Mapping[str, Any], outcome: Invariance, seconds: float) -> None:
    """Readers see the whole record or none."""
    record = {
        "format": FORMAT,
        "facts": facts,
        "equal": asdict(outcome),
        "seconds": round(seconds, 3),
    }
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(record, indent=1, sort_keys=True))
        temporary.replace(file)
    except OSError as error:
        _log.warning("%s cannot be written (%s): the next process proves it again", file, error)
        with suppress(OSError):
            temporary.unlink()
