"""The configurations of docs/coming-from-trl-verl.md, over the rows and rewards shown there."""

import json
from pathlib import Path

import polars as pl
import pytest
from support.cases import others_slow
from support.chat_folders import QWEN3, chat_folder
from support.hf_models import config_of
from test_doc_commands import blocks

from marin_rl.config import load_config
from marin_rl.doctor.engines import STAGES
from marin_rl.doctor.stages import examine
from marin_rl.planning import plan

PAGE = "docs/coming-from-trl-verl.md"
MODEL = "/models/Qwen3-0.6B"


def block(language: str, part: str) -> str:
    """The code block of the page that has this text."""
    (found,) = [each for each in blocks(PAGE, language) if part in each]
    return found


def write_page(folder: Path) -> None:
    """Write the files of the page next to each other, with a small model's folder for theirs."""
    model = str(chat_folder(folder / "model", QWEN3))
    settings = config_of("qwen3") | {"vocab_size": 512, "max_position_embeddings": 2048}
    (folder / "model/config.json").write_text(json.dumps(settings), encoding="utf-8")
    for name in ("sums.yaml", "gsm8k.yaml"):
        text = block("yaml", f"# {name}").replace(MODEL, model)
        (folder / name).write_text(text, encoding="utf-8")
    for name in ("rewards.py", "reward.py"):
        (folder / name).write_text(block("python", f"# {name}"), encoding="utf-8")
    shown = [json.loads(line) for line in block("jsonl", '"solution"').splitlines()]
    (message,) = shown[0]["prompt"]
    texts = [[message | {"content": f"{n} + 2?"}] for n in range(400)]
    prompts = [shown[0] | {"prompt": each, "solution": str(n + 2)} for n, each in enumerate(texts)]
    assert {json.dumps(row) for row in shown[:1]} <= {json.dumps(row) for row in prompts}
    lines = "".join(f"{json.dumps(row)}\n" for row in prompts)
    (folder / "prompts.jsonl").write_text(lines, encoding="utf-8")
    verl = [
        {
            "data_source": "sums",
            "prompt": row["prompt"],
            "reward_model": {"style": "rule", "ground_truth": row["solution"]},
        }
        for row in prompts
    ]
    for name in ("train.parquet", "test.parquet"):
        pl.DataFrame(verl).write_parquet(folder / name)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_page(folder)
    return folder


# Those that need no weights, no device and no server.
CHECKS = ("environment", "data", "tokenizer", "chat template", "prompts", "tools", "reward")


@pytest.mark.parametrize("name", others_slow(["sums.yaml", "gsm8k.yaml"], first=1))
def test_doctor_and_the_plan_take_the_yaml_with_the_users_files(page: Path, name: str):
    config = load_config(page / name, [])
    findings = list(examine(config, [stage for stage in STAGES if stage.name in CHECKS]))
    assert [each for each in findings if not each.passed] == []
    assert len(findings) == len(CHECKS)
    assert plan(config)
