"""Batches on disk: parts of bounded size, views without copies, refusals that name the file."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.run_factories import commit_round, configuration, group

from marin_rl.batching.build import build_round
from marin_rl.errors import CorruptObject, ObjectMissing
from marin_rl.storage.runs import Run
from marin_rl.storage.stores.filesystem import open_store
from marin_rl.storage.tables.batches import BatchWriter, StepRows, read_batches, read_dispositions
from marin_rl.types import SlotRef
from schemas.tables import ARRAYS, DISPOSITIONS, INTEGER_ARRAYS


def _built(root: str, options: dict[str, Any] | None = None) -> tuple[Run, SlotRef]:
    run = Run.create_or_open(
        configuration(root, storage_options=options or {}, batching={"sequences_per_step": 2})
    )
    sealed = commit_round(run, 0, [[group("g", [0.0, 1.0, 1.0]), group("h", [1.0, 1.0])]])
    return run, build_round(run, 0, sealed)


def test_batches_on_every_backend(root: tuple[str, dict[str, Any]]) -> None:
    run, ref = _built(*root)
    steps = list(read_batches(run, ref))
    assert [step.rollout_ids for step in steps] == [(("g/0",), ("g/1",)), (("g/2",),)]
    assert [step.token_ids.shape for step in steps] == [(2, 32), (1, 32)]
    table = read_dispositions(run, 0)
    assert table.schema.equals(DISPOSITIONS)
    assert table["disposition"].to_pylist() == ["consumed"] * 3 + ["filtered"] * 2


def test_parts_are_closed_when_they_are_full(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    writer = BatchWriter(store, "batches/round-00000", "a1", 4, part_bytes_max=1)
    for value in range(3):
        arrays = {
            name: np.full((2, 4), value, np.int32 if name in INTEGER_ARRAYS else np.float32)
            for name in ARRAYS
        }
        names = pa.array([[f"{value}/0"], [f"{value}/1"]])
        writer.write(StepRows(arrays=arrays, rollout_ids=names, environments=names))
    parts = writer.close()
    assert [(part.name, part.rows) for part in parts] == [
        (f"batches-a1-{index:04d}.parquet", 2) for index in range(3)
    ]
    assert store.list("batches") == [f"batches/round-00000/{part.name}" for part in parts]


@pytest.mark.parametrize("kind", ["batches-", "dispositions-"])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damaged_parts_are_named(tmp_path: Path, kind: str, damage: str) -> None:
    run, ref = _built(str(tmp_path))
    (path,) = (tmp_path / "run" / "batches" / "round-00000").glob(f"{kind}*")
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data if damage == "flip" else data[:-9])
    with pytest.raises(
        CorruptObject, match=rf"{path.name}: expected (SHA-256|\d+ bytes).*restore it"
    ):
        list(read_batches(run, ref)) if kind == "batches-" else read_dispositions(run, 0)


def test_uncommitted_batches_are_missing_and_foreign_ones_refused(tmp_path: Path) -> None:
    run, ref = _built(str(tmp_path))
    with pytest.raises(ObjectMissing, match=r"batches/round-00001.*not committed"):
        read_dispositions(run, 1)
    with pytest.raises(ObjectMissing, match="not committed"):
        list(read_batches(run, SlotRef(slot="batches/round-00001", sha256=ref.sha256)))
    with pytest.raises(CorruptObject, match="expected SHA-256 0000"):
        list(read_batches(run, SlotRef(slot=ref.slot, sha256="0000")))
