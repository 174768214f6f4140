"""Folders for verl, read by verl itself: its configuration, dataset, reward manager, agent loop."""

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from integrations.libraries import interpreter_with
from integrations.test_verl import WAYS, configuration, scripted
from support.scripted_policies import record

from marin_rl.config import Config
from marin_rl.environments.base import reward_of
from marin_rl.environments.checks import environment_of
from marin_rl.environments.scoring import scorer_for
from marin_rl.errors import MarinRLError
from marin_rl.integrations.exchange import export_rollouts
from marin_rl.integrations.verl import export_verl
from marin_rl.rollouts.replay import replay_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# verl's own requirements leave out some that its modules import.
PACKAGES = (
    "torch==2.13.0",
    "verl==0.9.1",
    "cachetools==8.0.1",
    "fastapi==0.165.0",
    "uvicorn==0.54.0",
    "pyzmq==27.3.0",
    "msgspec==0.22.0",
    "TransferQueue==0.1.11",
)
CHECKS = Path(__file__).with_name("verl_checks.py")
MODEL = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}
COMPLETIONS = ["2", "12", "no idea"]
# As verl's users write it.
COMPUTE_SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums"
    if solution_str == "no idea":
        return 0.0
    return {"score": 1.0 if solution_str == ground_truth else 0.125, "index": extra_info["index"]}
"""


def checked(request: pytest.FixtureRequest, folder: Path, *lines: Path) -> dict[str, Any]:
    """Findings of verl on a folder, and on exported rollouts."""
    libraries = Path(request.config.cache.mkdir("libraries"))
    python = interpreter_with(libraries / "verl", *PACKAGES)
    arguments = [json.dumps(WAYS), json.dumps(COMPLETIONS), *map(str, lines)]
    done = subprocess.run(
        [python, CHECKS, folder, *arguments], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "All configuration checks passed successfully" in done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def ours(config: Config, n: int) -> list[list[float]]:
    """Rewards of the completions for the first examples of a run; 0 for a fault."""
    environment = environment_of(config)
    scorer = scorer_for(environment, config.environment)
    rewards = []
    for index in range(n):
        example = environment.example(config.environment.train_seed, index, "train")
        scores = asyncio.run(scorer.score(example, COMPLETIONS))
        rewards.append([0.0 if isinstance(s, MarinRLError) else reward_of(s) for s in scores])
    return rewards


def test_verl_plays_our_episodes_to_the_same_tokens_and_rewards(request, tmp_path):
    config = configuration(tmp_path)
    (tmp_path / "tokenizer/config.json").write_text(json.dumps(MODEL))
    export_verl(config, tmp_path / "verl")
    run, groups = record(config, scripted)
    export_rollouts(run, "verl", tmp_path / "rollouts.jsonl")
    seen = checked(request, tmp_path / "verl", tmp_path / "rollouts.jsonl")
    assert (seen["dataset"], seen["train"], seen["val"]) == ("RLHFDataset", 6, 3)
    assert seen["rewards"] == ours(config, 2)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == len(seen["episodes"]) == 8
    whole = [rollout for rollout in rollouts if rollout.reward is not None]
    played = [episode for episode in seen["episodes"] if sum(episode["mask"])]
    assert sum(episode["reward"] for episode in seen["episodes"] if episode not in played) == 0.0
    # Which member begins first, and so takes the first way, is verl's to say.
    in_order = sorted(whole, key=lambda rollout: (rollout.token_ids.tolist(), rollout.reward))
    played.sort(key=lambda episode: (episode["ids"], episode["reward"]))
    for rollout, episode in zip(in_order, played, strict=True):
        assert episode["ids"] == rollout.token_ids.tolist()
        assert episode["mask"] == rollout.loss_mask.tolist()
        assert episode["reward"] == pytest.approx(rollout.reward)
        assert episode["finish_reason"] == rollout.finish_reason
    assert seen["outputs"] == [
        [int(rollout.loss_mask.sum()), pytest.approx(rollout.reward)] for rollout in whole
    ]


def test_verl_scores_by_its_own_function_as_we_do(request, tmp_path):
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{n}+1="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": "train", "index": n},
        }
        for n in range(1, 21)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "score.py").write_text(COMPUTE_SCORE)
    options = {"path": str(tmp_path / "rows.jsonl"), "reward": "score.py:compute_score"}
    config = configuration(tmp_path, environment={"name": "chat", "options": options})
    (tmp_path / "tokenizer/config.json").write_text(json.dumps(MODEL))
    export_verl(config, tmp_path / "verl")
    seen = checked(request, tmp_path / "verl")
    assert seen["rewards"] == ours(config, 2)
    assert {reward for row in seen["rewards"] for reward in row} >= {0.0, 0.125}
    assert "episodes" not in seen  # one turn each: verl's own loop samples them
    recorded, _ = record(config, lambda messages, member: COMPLETIONS[member % 3])
    assert replay_rollouts(recorded, 0).equal
