"""Checks of finished runs that take groups of a stream, whatever disturbed them."""

import pyarrow as pa

from marin_rl.analysis.verify import verify_run
from marin_rl.config import Config
from marin_rl.storage.run_progress import progress
from marin_rl.storage.runs import Run
from marin_rl.storage.tables.intakes import read_intake
from marin_rl.storage.tables.rollouts import iter_shards
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.storage.upkeep.fsck import check_run


def checked(config: Config) -> Run:
    """The finished run, after a check of its rounds, intakes, audit, metrics and files."""
    run = Run.open(config.root, config.run_id)
    rounds = range(config.rounds)
    assert [number for number, item in progress(run).items() if item.metrics] == [*rounds]
    seen = set[int]()
    for round in rounds:
        intake = read_intake(run, round)
        assert len(intake.taken) == config.rollouts.groups_per_round
        bound = config.staleness_rounds_max
        assert all(round - version <= bound for _, _, version, *_ in intake.taken)
        order = [(version, number) for number, _, version, *_ in intake.taken]
        assert order == sorted(order)
        assert seen.isdisjoint(number for number, *_ in intake.groups)
        seen.update(number for number, *_ in intake.groups)
        rows = pa.concat_tables(iter_shards(run, round, ["policy_version_min", "round"]))
        assert set(rows["round"].to_pylist()) == {round}
    assert all(item.balanced for item in audit_run(run))
    assert [finding.message for finding in verify_run(run) if finding.problem] == []
    faults = check_run(config.root, config.run_id).faults
    assert [fault for fault in faults if not fault.harmless] == []
    return run
