"""Memory of the host while a checkpoint is written and read, of each process its share."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from support.checkpoint_memory import measured

from flows.server import free_port
from marin_rl.config import Config
from marin_rl.storage.runs import Run

pytestmark = pytest.mark.slow


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux")
@pytest.mark.parametrize("count", [1, 2])
def test_a_process_needs_little_more_than_its_share(count: int, tmp_path: Path):
    Run.create_or_open(Config(root=str(tmp_path), run_id="memory"))
    place, spawn = f"127.0.0.1:{free_port()}", multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, spawn) as pool:
        each = [pool.submit(measured, place, str(tmp_path), count, n) for n in range(count)]
        shares = [future.result(timeout=300) for future in each]
    for saving, loading in shares:
        assert 1.0 <= saving < 1.3, shares
        assert 0.9 < loading < 1.3, shares
