"""Benchmarks that play whole runs run, in each of their modes, at the smallest size."""

import pytest
from bench_modes import MODES_OF_RUNS, check_mode, forked_scripts


@pytest.fixture(scope="module")
def forked(prefect_url, tmp_path_factory):
    with forked_scripts(prefect_url, tmp_path_factory.mktemp("forked") / "said") as forked:
        yield forked


@pytest.mark.slow
@pytest.mark.parametrize("name", MODES_OF_RUNS)
def test_a_benchmark_of_runs_runs_at_its_smallest_size(name, forked, tmp_path):
    check_mode(name, forked, tmp_path)
