"""`marin-rl serve --model` with its defaults: a stream token by token, in little memory.

MARIN_RL_LM_EVAL names a Python that has `lm-eval[api]` 0.4.13, which is then run at the server.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from marin_rl.evaluation import EvaluationRequest, Target, evaluate_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LM_EVAL = "MARIN_RL_LM_EVAL"
MEMORY_BYTES_MAX = 10**9  # above the weights
QUESTION = {"role": "user", "content": "What is the capital of France?"}


@contextmanager
def served(real_model: Path) -> Iterator[tuple[str, int, int]]:
    """Base URL, process id, and bytes of the weights of a server in another process."""
    command = [sys.executable, "-m", "marin_rl", "serve", "--model", str(real_model), "--port", "0"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            said = ""
            for line in process.stderr:
                said += line
                if match := re.match(r"serving \S+ at (http\S+)$", line):
                    weights = re.search(r"^weights ([\d.]+) GB", said, re.M)
                    assert weights is not None, said
                    yield match[1], process.pid, int(float(weights[1]) * 1e9)
                    break
            else:
                raise AssertionError(said)
        finally:
            process.kill()


def streamed(url: str, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream's chunks, in order."""
    body = {"model": "policy", "messages": [QUESTION], "temperature": 0, "stream": True, **fields}
    with httpx2.Client(timeout=600) as http:
        text = http.post(f"{url}/chat/completions", json=body).raise_for_status().text
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]


def test_a_lone_stream_comes_token_by_token_with_the_right_text(real_model: Path) -> None:
    with served(real_model) as (url, _, _):
        choices = streamed(url, max_tokens=12, return_token_ids=True)
    assert [len(choice["token_ids"]) for choice in choices] == [1] * len(choices)
    assert len(choices) > 4
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text.startswith("The capital of France is Paris"), text


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_above_the_weights_is_small(real_model: Path) -> None:
    with served(real_model) as (url, _, _):
        streamed(url, max_tokens=4)  # compiling takes memory too: the next one finds its programs
    with served(real_model) as (url, pid, weights):
        assert streamed(url, max_tokens=4)
        status = Path(f"/proc/{pid}/status").read_text()
    # without the pages of files, most of which are the code of libraries
    anonymous = int(status.partition("RssAnon:")[2].split()[0]) * 1024
    print(f"{anonymous / 1e9:.2f} GB, of which {weights / 1e9:.2f} GB of weights")
    assert anonymous - weights < MEMORY_BYTES_MAX


CAPITALS = (
    ("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Japan", "Tokyo"),
    ("Russia", "Moscow"), ("Egypt", "Cairo"), ("Germany", "Berlin"), ("Greece", "Athens"),
    ("Poland", "Warsaw"), ("England", "London"), ("Peru", "Lima"), ("Cuba", "Havana"),
)  # fmt: skip
# Each as the harness has it, but for its rows, and gsm8k's worked examples, which it draws.
TASKS = {
    "gsm8k": {
        "output_type": "generate_until",
        "fewshot_split": "train",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {
            "until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False, "temperature": 0.0,
            "max_gen_toks": 48,
        },
        "metric_list": [{
            "metric": "exact_match", "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"],
        }],
        "filter_list": [{"name": "flexible-extract", "filter": [
            {"function": "regex", "group_select": -1,
             "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"},
            {"function": "take_first"},
        ]}],
    },
    "mmlu": {
        "output_type": "multiple_choice",
        "fewshot_split": "dev",
        "description": "The following are multiple choice questions (with answers) about "
        "capitals.\n\n",
        "doc_to_text": "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\n"
        "C. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:",
        "doc_to_choice": [*"ABCD"],
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
}  # fmt: skip


def write_suites(folder: Path) -> None:
    """Write rows of gsm8k and of mmlu as they are published, and the harness's tasks of them."""
    cities = [city for _, city in CAPITALS]
    facts = [
        {
            "question": f"What is the capital of {country}?",
            "subject": "capitals",
            "choices": [cities[(place + step - place % 4) % 12] for step in range(4)],
            "answer": place % 4,
        }
        for place, (country, _) in enumerate(CAPITALS)
    ]
    sums = [
        {"question": f"Tom has {n} apples and buys {n + 3}. How many has he?",
         "answer": f"{n} + {n + 3} = {2 * n + 3}\n#### {2 * n + 3}"}
        for n in range(2, 13)
    ]  # fmt: skip
    for name, rows in (
        ("gsm8k/test", sums[5:]), ("gsm8k/train", sums[:5]),
        ("mmlu/test", facts[5:]), ("mmlu/dev", facts[:5]),
    ):  # fmt: skip
        file = folder / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        files = {split: f"{name}/{split}.jsonl" for split in ("test", task["fewshot_split"])}
        shown = {"task": f"own_{name}", "dataset_path": "json", "test_split": "test"}
        shown |= {"dataset_kwargs": {"data_files": files}, "num_fewshot": 5}
        shown |= {"fewshot_config": {"sampler": "first_n"}}
        (folder / f"own_{name}.yaml").write_text(json.dumps(shown | task))


@pytest.mark.skipif(not os.environ.get(LM_EVAL), reason=f"{LM_EVAL} names no Python with lm-eval")
def test_lm_eval_at_the_server_gives_the_scores_of_evaluate(real_model, tmp_path):
    write_suites(tmp_path)
    with served(real_model) as (url, _, _):
        found = evaluate_target(
            Target(endpoint=url, model="policy"),
            EvaluationRequest(
                suites=("gsm8k:lm-eval-5shot", "mmlu:lm-eval-5shot"),
                data=str(tmp_path),
                max_tokens=48,
            ),
        )
        given = f"model=policy,base_url={url}/completions,tokenizer_backend=remote,max_length=2048"
        subprocess.run(
            [os.environ[LM_EVAL], "-m", "lm_eval", "run", "--model", "local-completions",
             "--model_args", given, "--tasks", "own_gsm8k,own_mmlu", "--include_path", ".",
             "--output_path", "out", "--log_samples"],
            check=True, cwd=tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    rollouts = [(group.example, group.rollouts[0]) for group in found.groups]
    ours = {name: {e.messages[0].content: r for e, r in rollouts if name in e.environment_version}
            for name in TASKS}  # fmt: skip
    for name, kind in (("gsm8k", "exact_match"), ("mmlu", "acc")):
        (file,) = tmp_path.glob(f"out/*/samples_own_{name}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        assert len(samples) == len(ours[name])
        for sample in samples:
            own = ours[name][sample["arguments"]["gen_args_0"]["arg_0"]]
            assert own.reward == sample[kind], sample
            if name == "gsm8k":
                assert own.turns[-1].content == sample["resps"][0][0]
        assert 0 < sum(sample[kind] for sample in samples) < len(samples), name
