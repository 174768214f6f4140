"""Bad input is reported before any work is done, and leaves nothing behind."""

from pathlib import Path

import pytest
from support.fakes import FakePolicyServer

from marin_rl.config import Config, load_config
from marin_rl.doctor.data import TRIALS, reward, storage
from marin_rl.doctor.engines import STAGES, check_all, mesh
from marin_rl.doctor.stages import DOCTOR, REWARD_MODEL, RL, examine
from marin_rl.errors import ConfigError, InputError, StalePolicy, StorageError

DEBUG = Path(__file__).parent.parent / "configs/debug.yaml"


def debug(root: Path, *overrides: str) -> Config:
    return load_config(DEBUG, [f"root={root}", *overrides])


def test_a_sound_configuration_passes_every_check(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    findings = list(examine(debug(tmp_path), STAGES))
    assert [finding.name for finding in findings] == [
        stage.name for stage in STAGES if DOCTOR in stage.used_by
    ]
    assert all(finding.passed for finding in findings), findings


def test_a_root_that_did_not_exist_does_not_exist_afterwards(tmp_path: Path) -> None:
    root = tmp_path / "new/runs"
    assert "writable" in storage(debug(root))
    assert not root.parent.exists()
    root.mkdir(parents=True)
    storage(debug(root))
    assert root.exists()


def test_an_environment_of_several_turns_is_not_scored_by_one() -> None:
    verdict, *prompts = reward(load_config(DEBUG.with_name("game.yaml"))).splitlines()
    assert verdict == (
        "episodes of several turns: their steps, or the score of a finished one, bring the reward, "
        "and none is played here"
    )
    assert prompts == ["  '<|user|>1-8<|assistant|>'"] * TRIALS


def test_a_root_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="in the way of a folder"):
        check_all(debug(tmp_path / "file" / "runs"), RL)


def test_an_endpoint_that_serves_another_model_is_an_error(tmp_path: Path) -> None:
    with FakePolicyServer(model="something-else") as server:
        endpoint = f"inference.endpoints=['{server.url}']"
        with pytest.raises(StalePolicy, match="something-else, not 'policy'"):
            check_all(debug(tmp_path, endpoint), RL)


def test_a_mesh_larger_than_the_machine_is_an_error(tmp_path: Path) -> None:
    (found,) = (
        finding
        for finding in examine(debug(tmp_path, "mesh.data=64"), STAGES)
        if finding.name == "devices"
    )
    assert not found.passed
    assert "does not fit 2 devices" in found.detail
    with pytest.raises(ConfigError, match="does not fit 2 devices"):
        check_all(debug(tmp_path, "mesh.data=64"), RL)
    assert mesh(debug(tmp_path, "mesh.data=-1")) == "fits any number of devices"


def test_pairs_are_read_to_the_end_before_a_reward_model_is_begun(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = ['{"prompt": "p", "chosen": "a", "rejected": "b"}', '{"prompt": "p", "chosen": 4}']
    file.write_text("\n".join(rows))
    with pytest.raises(InputError, match="line 2, field chosen"):
        check_all(debug(tmp_path, f"reward_model.pairs={file}"), REWARD_MODEL)
    with pytest.raises(InputError, match="cannot read"):
        check_all(debug(tmp_path, "reward_model.pairs=/nowhere.jsonl"), REWARD_MODEL)
    with pytest.raises(ConfigError, match="no section reward_model"):
        check_all(debug(tmp_path), REWARD_MODEL)
    assert not (tmp_path / "debug").exists()
