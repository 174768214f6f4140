"""A reward that rises, for environments that ship: tiny models, rows that this script writes.

    python bench/learning.py [--only code,repository,mastermind] [--rounds N] [--root FOLDER]

Each is one `marin-rl run` in a temporary folder (`--root` keeps it). A warm start teaches the form
of an answer and draws its content at random, so all that is learned about the task comes from
rewards:

- `code`: the function that a word asks for, as a program with a test in the sandbox;
- `repository`: the value that an issue asks for, written by the tool `shell`, with the row's test;
- `mastermind`: two pegs of three colours; the warm start shows random legal moves.

Each prints one line of JSON: the mean reward of the first two rounds and of the last two, of
held-out examples before and after, and CPU-seconds of the run with all of its processes.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import yaml
from machine import head

sys.path.insert(0, str(Path(__file__).parent.parent))  # this checkout, whatever is installed

from engine_own import report

from marin_rl.analysis.scan import scan_evals, scan_rollouts
from marin_rl.environments.sandbox_tools import NO_OUTPUT

CHECKOUT = Path(__file__).parent.parent
OPERATIONS = {"sum": "+", "difference": "-", "product": "*"}
PROGRAM = "```python\na,b=map(int,input().split());print(a"
PROGRAM_END = "b)\n```"
WARM_START_SEED = 4_000_000_000
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "echo V='
CALL_END = '>v.py"}}\n</tool_call>'
Tree = dict[str, Any]

BASE: Tree = {
    "seed": 0,
    "policy": {
        "init": "sft",
        "model": {
            "hidden_size": 64,
            "layers": 2,
            "heads": 4,
            "kv_heads": 4,
            "intermediate_size": 192,
            "initializer_range": 0.1,
        },
    },
    "objective": {
        "advantage": "rloo",
        "advantage_scale": "batch_whitening",
        "surrogate": "ppo_clip",
        "ratio_level": "token",
        "aggregation": "token_mean",
        "entropy_coefficient": 0.003,
    },
    "batching": {"packing": "sequences", "row_tokens": 256},
    "inference": {"turns_per_request": 128, "engine": {"slots": 128, "chunk_steps": 4}},
    "training": {
        "learning_rate": 2e-3,
        "warmup_steps": 3,
        "beta2": 0.99,
        "epochs": 4,
        "microbatch_sequences": 32,
    },
    "sft": {
        "steps": 200,
        "sequences_per_step": 64,
        "microbatch_sequences": 64,
        "learning_rate": 3e-3,
        "warmup_steps": 10,
        "steps_per_checkpoint": 200,
    },
    "evaluation": {"every_rounds": 1000},
}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--only", default=",".join(RUNS), help="environments, by comma")
    parser.add_argument("--rounds", type=int, default=0, help="0: as many as each one takes")
    parser.add_argument("--root", type=Path, help="folder that keeps the runs")
    parser.add_argument("--set", action="append", default=[], help="as of `marin-rl run`")
    return parser.parse_args()


def main() -> None:
    """Train every environment that is asked for."""
    options = parse()
    sys.stdout.write(head() + "\n")
    with tempfile.TemporaryDirectory() as temporary:
        root = (options.root or Path(temporary)).absolute()
        for name in options.only.split(","):
            folder = root / name
            folder.mkdir(parents=True, exist_ok=True)
            tree = merged(BASE, RUNS[name](folder), {"run_id": name, "root": str(root / "runs")})
            if options.rounds:
                tree["rounds"] = options.rounds
            report(name, trained(folder / "run.yaml", tree, options.set))


def merged(*trees: Mapping[str, Any]) -> Tree:
    """Nested mappings as one; later values win."""
    result: Tree = {}
    for tree in trees:
        for key, value in tree.items():
            both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
            result[key] = merged(result[key], value) if both else value
    return result


def trained(file: Path, tree: Tree, changes: Iterable[str]) -> dict[str, Any]:
    """Run a configuration with changes; what it learned."""
    file.write_text(yaml.safe_dump(tree, sort_keys=False))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "marin_rl", "run", str(file)]
    command += [part for change in changes for part in ("--set", change)]
    subprocess.run(command, check=True, cwd=CHECKOUT, stdout=sys.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    place = tree["root"], tree["run_id"]
    of_rounds = scan_rollouts(*place).group_by("round").agg(pl.col("reward").mean())
    rewards = of_rounds.sort("round").collect()["reward"].to_list()
    of_evals = scan_evals(*place).group_by("round").agg(pl.col("reward").mean())
    held_out = of_evals.sort("round").collect()["reward"].to_list()
    return {
        "rounds": len(rewards),
        "reward_first": sum(rewards[:2]) / len(rewards[:2]),
        "reward_last": sum(rewards[-2:]) / len(rewards[-2:]),
        "held_out_first": held_out[0],
        "held_out_last": held_out[-1],
        "cpu_seconds": sum(after[:2]) - sum(before[:2]),
    }


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    """Write JSON lines; return the file as options name it."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def warm_start(file: Path, rows: Iterable[Mapping[str, Any]]) -> Tree:
    """The environment of demonstrations."""
    options = {"path": write_rows(file, rows)}
    return {"name": "chat", "train_seed": WARM_START_SEED, "options": options}


def code(folder: Path) -> Tree:
    """Problems such as `product 07`; the warm start has programs of any of the three functions."""
    draw = random.Random(0)
    rows = [
        {"id": f"{word}-{n}", "question": f"{word} {n:02d}", "tests": [test_of(sign, draw)]}
        for n in range(30)
        for word, sign in OPERATIONS.items()
    ]
    shown = [
        {"prompt": row["question"], "completion": f"{PROGRAM}{sign}{PROGRAM_END}"}
        for row in rows
        for sign in OPERATIONS.values()
    ]
    draw.shuffle(shown)
    options = {"path": write_rows(folder / "rows.jsonl", rows), "instruction": ""}
    return {
        "rounds": 12,
        "policy": {
            "context_length": 48,
            "tokenizer": write_tokenizer(folder / "tokenizer", PROGRAM, PROGRAM_END, *OPERATIONS),
        },
        "environment": {"name": "code", "options": options, "reward_timeout_s": 60},
        "sampling": {"max_tokens": 8},
        "rollouts": {"groups_per_round": 16, "group_size": 8},
        "sft": {"environment": warm_start(folder / "shown.jsonl", shown)},
        "evaluation": {"examples": 12},
    }


def test_of(sign: str, draw: random.Random) -> dict[str, str]:
    """An input on which the functions differ, and what the one with this sign makes of it."""
    a, b = draw.randint(3, 9), draw.randint(20, 99)
    values = {"+": a + b, "-": a - b, "*": a * b}
    return {"input": f"{a} {b}\n", "output": f"{values[sign]}\n"}


def repository(folder: Path) -> Tree:
    """Issues such as `3b`: V in v.py must be 3. The warm start writes any of four values."""
    commit = make_clone(folder / "clones" / "toy")
    values, letters = range(1, 5), "abcdefgh"
    rows = [
        {
            "instance_id": f"{value}{letter}",
            "repo": "bench/toy",
            "base_commit": commit,
            "problem_statement": f"{value}{letter}",
            "test_patch": test_patch(value),
            "FAIL_TO_PASS": ["tests.test_v.T.test"],
            "PASS_TO_PASS": [],
        }
        for value in values
        for letter in letters
    ]
    shown = [
        row
        for value in values
        for letter in letters
        for wanted in values
        for row in shown_turns(f"{value}{letter}", f"{CALL}{wanted}{CALL_END}")
    ]
    random.Random(0).shuffle(shown)
    options = {
        "path": write_rows(folder / "rows.jsonl", rows),
        "repositories": str(folder / "clones"),
        "instruction": "",
        "malformed": "end",
        "test_timeout_s": 20,
        "shell_timeout_s": 10,
    }
    return {
        "rounds": 10,
        "policy": {
            "context_length": 48,
            "tokenizer": write_tokenizer(
                folder / "tokenizer", CALL, CALL_END, NO_OUTPUT, "done", "shell"
            ),
        },
        "environment": {
            "name": "repository",
            "turns_max": 3,
            "options": options,
            "reward_timeout_s": 60,
        },
        "sampling": {"max_tokens": 16},
        "rollouts": {"groups_per_round": 8, "group_size": 8},
        "sft": {"environment": warm_start(folder / "shown.jsonl", shown)},
        "evaluation": {"examples": 4},
    }


def make_clone(folder: Path) -> str:
    """A repository of one commit; its name."""
    (folder / "tests").mkdir(parents=True, exist_ok=True)
    (folder / "v.py").write_text("V = 0\n")
    (folder / "tests" / "__init__.py").touch()
    git = ["git", "-C", str(folder), "-c", "user.name=bench", "-c", "user.email=bench@localhost"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "base", "--allow-empty"]):
        subprocess.run([*git, *command], check=True)
    head_of = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    )
    return head_of.stdout.strip()


def test_patch(value: int) -> str:
    """The test of a row, as a patch that adds its file."""
    lines = (
        "import unittest",
        "import v",
        "class T(unittest.TestCase):",
        "    def test(self):",
        f"        self.assertEqual(v.V, {value})",
    )
    added = "".join(f"+{line}\n" for line in lines)
    return (
        "diff --git a/tests/test_v.py b/tests/test_v.py\nnew file mode 100644\n--- /dev/null\n"
        f"+++ b/tests/test_v.py\n@@ -0,0 +1,{len(lines)} @@\n{added}"
    )


def shown_turns(issue: str, call: str) -> list[dict[str, Any]]:
    """A call, and the turn after its result; the system message lists the tool, as templates do."""
    first = [{"role": "system", "content": "shell"}, {"role": "user", "content": issue}]
    result = [{"role": "assistant", "content": call}, {"role": "tool", "content": NO_OUTPUT}]
    return [
        {"prompt": first, "completion": call},
        {"prompt": [*first, *result], "completion": "done"},
    ]


def write_tokenizer(folder: Path, *tokens: str) -> str:
    """The tokenizer of `marin-rl init tools`, with tokens for the fixed parts of an answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CHECKOUT / "marin_rl/templates/tools/tokenizer")
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(folder)
    return str(folder)


def mastermind(folder: Path) -> Tree:
    """Nine codes, of which two are held out."""
    del folder
    game = {"game": "mastermind", "size": 2, "colours": 3, "turns_max": 6}
    shown = {"name": "game", "train_seed": WARM_START_SEED, "options": game | {"opening": "random"}}
    return {
        "rounds": 40,
        "policy": {"context_length": 64},
        "environment": {"name": "game", "options": game},
        "sampling": {"max_tokens": 4},
        "rollouts": {"groups_per_round": 16, "group_size": 16},
        "inference": {"turns_per_request": 256, "engine": {"slots": 256, "chunk_steps": 2}},
        "batching": {"row_tokens": 128},
        "objective": {"turn_discount": 1.0, "entropy_coefficient": 0.01},
        "training": {"schedule": "linear", "schedule_steps": 200},
        "sft": {"environment": shown},
        "evaluation": {"examples": 2},
    }


RUNS: dict[str, Callable[[Path], Tree]] = {
    "code": code,
    "repository": repository,
    "mastermind": mastermind,
}


if __name__ == "__main__":
    main()
