"""Every command of the docs runs: those of a page in their order, in one folder, as a reader types.

The folder has copies of `configs/` with small models and few rounds. Names that stand for something
of the reader's, such as RUN, are replaced. Commands that need what is not here are listed with the
test that plays them.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from forked_commands import ForkedCommands
from test_doc_commands import ALL, PAGES, Command, blocks

Value = TypeVar("Value")

TESTS = Path(__file__).parent
CONFIGS = TESTS.parent / "configs"

# Played elsewhere: where the words of a command begin like this, by which test.
ELSEWHERE = {
    "docs/lora.md": {"run configs/prod-lora.yaml": "test_cli.py"},
    "docs/hugging-face-models.md": {"import --gguf": "test_gguf.py"},
    "docs/other-libraries.md": {
        "serve-trajectories": "integrations/test_atropos_push.py",
        "run atropos.yaml": "integrations/test_atropos_push.py",
    },
    "docs/reading-runs.md": {"evaluate https://": "test_evaluation.py"},
    "docs/running-at-scale.md": {
        "run CONFIG --set inference.endpoints=registered": "flows/test_fleet.py",
        "run CONFIG --set inference.endpoints=http": "flows/test_vllm.py",
        "run CONFIG --set flow.runner=ray": "flows/test_runners.py",
    },
    "docs/asynchrony.md": {
        "run CONFIG --set asynchrony.curriculum": "flows/test_choices.py",
        "run CONFIG --set asynchrony.replay": "flows/test_choices.py",
        "run CONFIG --set asynchrony.partial_tokens": "flows/test_windowed.py",
        "run CONFIG --set asynchrony.in_flight_updates": "flows/test_in_flight.py",
    },
    "docs/security.md": {"evaluate theirs": "attacks/test_trust.py"},
    "docs/sft.md": {"": "test_doc_commands.py"},
    "docs/tools.md": {"": "test_doc_commands.py"},
    "docs/your-environment.md": {"env try game": "rollouts/test_trial.py"},
}
# Servers and pages that follow a run: they go on until they have printed this, then Ctrl-C.
UNTIL = {"serve": "http://", "view": "http://"}


def played_elsewhere(command: Command) -> str | None:
    """Return the test that plays a command, if it is not played here."""
    return at_start(ELSEWHERE.get(command.page, {}), " ".join(command.words))


def at_start(values: Mapping[str, Value], line: str) -> Value | None:
    """Return the value whose key a line begins with, if there is one."""
    return next((value for start, value in values.items() if line.startswith(start)), None)


HERE = [command for command in ALL if played_elsewhere(command) is None]


def test_commands_that_other_tests_play_are_in_the_docs():
    for page, tests in ELSEWHERE.items():
        lines = [" ".join(command.words) for command in ALL if command.page == page]
        for start, test in tests.items():
            assert any(line.startswith(start) for line in lines), (page, start)
            assert (TESTS / test).is_file(), test


def smaller(name: str, **changes: Any) -> str:
    """A shipped configuration with a small model, few samples and these changes."""
    tree = yaml.safe_load((CONFIGS / name).read_text(encoding="utf-8"))
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
    return yaml.safe_dump(tree, sort_keys=False)


MODEL = {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate_size": 64}
FEW: dict[str, Any] = {
    "rollouts": {"groups_per_round": 4, "group_size": 4, "shards_per_round": 1},
    "evaluation": {"examples": 8},
}


def prepare(folder: Path) -> None:
    """Write what the pages speak of: configurations, and the reader's files."""
    demo = FEW | {"rounds": 4, "sft": {"sequences_per_step": 2, "microbatch_sequences": 2}}
    demo |= {"policy": {"model": MODEL}, "training": {"microbatch_sequences": 16}}
    demo["inference"] = {"engine": {"slots": 16, "chunk_steps": 12, "prefill_rows": 8}}
    game = FEW | {"rounds": 1, "sft": {"steps": 2, "steps_per_checkpoint": 2}}
    reward = {"policy": {"model": MODEL}, "reward_model": {"pairs_per_step": 4}}
    preference = {"policy": {"model": MODEL}, "preference": {"pairs_per_step": 4}}
    page = "docs/data-and-rewards.md"
    write = {
        "configs/demo.yaml": smaller("demo.yaml", **demo),
        "configs/game.yaml": smaller("game.yaml", **game),
        "configs/reward_model.yaml": smaller("reward_model.yaml", **reward),
        "configs/preference.yaml": smaller("preference.yaml", **preference),
        "configs/debug.yaml": smaller("debug.yaml"),
        "data-and-rewards/my.yaml": first("docs/data-and-rewards.md", "environment:\n  name: chat")
        + DEBUG,
        "data-and-rewards/prompts.jsonl": "".join(problem(number) for number in range(40)),
        "problems.jsonl": "".join(problem(number) for number in range(8)),
        "data-and-rewards/rewards.py": first(page, "def exact", "python"),
        "counting.yaml": first("docs/your-environment.md", "# counting.yaml"),
        "envs.py": first("docs/your-environment.md", "# envs.py", "python"),
        "spell.yaml": smaller("debug.yaml", run_id="spell", rounds=1),
    }
    for name, text in write.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


DEBUG = smaller("debug.yaml").partition("environment:")[0] + "sampling: {max_tokens: 4}\n"


def first(page: str, start: str, language: str = "yaml") -> str:
    """The first block of a page that begins like this."""
    return next(block for block in blocks(page, language) if block.startswith(start))


def problem(number: int) -> str:
    """A line of JSON: a sum."""
    return json.dumps({"prompt": f"{number}+1=", "answer": str(number + 1)}) + "\n"


# What stands in the docs for something of the reader's.
NAMES = {
    "CONFIG": "configs/debug.yaml",
    "ROOT": "runs",
    "/models/Qwen3-0.6B": "hf",
    "path/to/hf-folder": "hf",
    "math=path/to/adapter": "math=peft",
    "code=path/to/other": "code=peft",
}
RUNS = {
    "docs/lora.md": "lora",
    "docs/your-environment.md": "counting",
    "docs/asynchrony.md": "demo",
    "docs/running-at-scale.md": "demo",
}  # what RUN is on a page
OUTPUTS = {
    "docs/lora.md": (("peft",), ("hf", "peft", "merged"), ("whole",))  # FOLDER, in order
}
SHORT = ("--rounds", "1", "--set", "sft.steps=2", "--set", "evaluation.examples=4")
SMALL = (
    *SHORT,
    *("--set", "rollouts.groups_per_round=4", "--set", "rollouts.group_size=4"),
    *("--set", "policy.model.layers=1", "--set", "evaluation.samples=1"),
    *("--set", "sft.sequences_per_step=4", "--set", "sft.microbatch_sequences=4"),
    *("--set", "inference.engine.slots=16", "--set", "inference.engine.prefill_rows=8"),
)
# Words that are added: a name, less to do. By page, and how the words of a command begin.
ADDED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "README.md": {
        "run demo.yaml --rounds": (*SMALL, "--rounds", "5"),
        "run demo.yaml": (*SMALL, "--rounds", "4"),
        "run arithmetic.yaml": SMALL,
    },
    "docs/install.md": {"run": SMALL},
    "docs/lora.md": {
        "run configs/demo.yaml --set policy.lora.rank=8": (*SHORT, "--run-id", "lora"),
        "run configs/demo.yaml --run-id demo-nf4": SHORT,
    },
    "docs/objectives.md": {"run configs/demo.yaml": SHORT},
    "docs/reward-models.md": {"run configs/demo.yaml --run-id judged": SHORT},
    "docs/data-and-rewards.md": {"run": ("--rounds", "1")},
    "docs/asynchrony.md": {
        "run CONFIG --set asynchrony.max_staleness=1": ("--run-id", "ahead"),
        "run CONFIG --set asynchrony.dynamic_sampling": (
            "--run-id",
            "filtered",
            "--set",
            "filters.zero_signal=true",
        ),
        "run CONFIG --set asynchrony.max_staleness=2": ("--run-id", "windowed"),
    },
}
# Pages that have a folder of their own.
ALONE = {"README.md", "docs/install.md", "docs/data-and-rewards.md"}


@dataclass(frozen=True, slots=True)
class Reader:
    """Someone who types the commands of pages, one page after the other."""

    folder: Path
    commands: ForkedCommands
    replaced: dict[str, int] = field(default_factory=dict[str, int])

    def type(self, command: Command) -> bool:
        """Run a command; return True for the exit code 0, or that of Ctrl-C in one that goes on."""
        line = " ".join(command.words)
        until = at_start(UNTIL, line)
        words = [*self._replaced(command), *(at_start(ADDED.get(command.page, {}), line) or ())]
        if command.words[0] in UNTIL:
            words += ["--port", "0"]
        variables = dict(each.split("=", 1) for each in command.variables)
        code = self.commands.run(self._place(command.page), *words, until=until, **variables)
        return code in ({0, 130, -2} if until else {0})

    def _place(self, page: str) -> Path:
        place = self.folder / Path(page).stem if page in ALONE else self.folder
        place.mkdir(exist_ok=True)
        return place

    def _replaced(self, command: Command) -> Iterator[str]:
        """Words with the reader's own in place of those that stand for them."""
        folders = iter(tuple[str, ...]())
        if "FOLDER" in command.words:
            number = self.replaced.get(command.page, 0)
            self.replaced[command.page] = number + 1
            folders = iter(OUTPUTS[command.page][number])
        for word in command.words:
            if word == "FOLDER":
                yield next(folders)
            elif word == "RUN":
                yield RUNS.get(command.page, "debug")
            else:
                yield NAMES.get(word, word)


@pytest.fixture(scope="module")
def reader(
    tmp_path_factory: pytest.TempPathFactory, compiled_quickly: None, prefect_url: str
) -> Iterator[Reader]:
    """A reader with the demo's run, as `make demo` leaves it, and a model folder."""
    folder = tmp_path_factory.mktemp("reader")
    prepare(folder)
    keys = {"MARIN_RL_API_KEY": "a-token-of-the-tests", "XDG_STATE_HOME": str(folder / "state")}
    with ForkedCommands(folder / "said", PREFECT_API_URL=prefect_url, **keys) as commands:
        reader = Reader(folder, commands)
        runs = ("run", "configs/demo.yaml"), ("run", "spell.yaml")
        for words in (*runs, ("export", "demo", "--hf", "hf")):
            assert commands.run(folder, *words) == 0, commands.said()
        yield reader


@pytest.mark.slow
@pytest.mark.in_order
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if any(c.page == page for c in HERE)])
def test_the_commands_of_a_page_run_in_their_order(page: str, reader: Reader):
    """Pages come in their order too: what one page makes, a later one may use."""
    for command in HERE:
        if command.page == page:
            assert reader.type(command), f"{command}\n{reader.commands.said()}"
