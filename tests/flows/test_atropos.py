"""A real environment of atropos, the server it pushes to and the run that trains, killed in turn.

Every group that the environment saw acknowledged is in the run once, and nothing else is.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.flow_runs import DEBUG, REPOSITORY
from support.libraries import interpreter_with
from support.library_facts import note

from marin_rl.config import load_config
from marin_rl.storage.runs import Run, shard_key
from marin_rl.storage.tables.rollouts import decode_shard, groups_of
from marin_rl.storage.upkeep.audit import audit_run
from marin_rl.storage.upkeep.fsck import check_run
from marin_rl.tokenizers import character_tokenizer
from marin_rl.types import RolloutGroup

ATROPOS = "atroposlib==0.4.0"
ROUNDS = 4
WAIT_S = 240


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Parts:
    """The three processes by name, each of which can be killed and started again."""

    def __init__(self, commands: dict[str, list[str]], log: Path, api: str) -> None:
        self._commands, self._log = commands, log
        self._variables = {**os.environ, "PREFECT_API_URL": api, "CUDA_VISIBLE_DEVICES": ""}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Start a process; what it prints goes to its log."""
        with (self._log / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                self._commands[name], cwd=REPOSITORY, env=self._variables, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        """Kill a process as the kernel does that is out of memory."""
        process = self.running.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the processes bring about."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, self.said()
            # They end by themselves after three tries to reach a server, within three seconds.
            ended = [
                n for n, p in self.running.items() if "environment" in n and p.poll() is not None
            ]
            for name in ended:
                self.start(name)
            time.sleep(0.05)

    def said(self) -> str:
        """The ends of the logs."""
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._log.glob("*.log")))


@contextmanager
def parts(commands: dict[str, list[str]], log: Path, api: str) -> Iterator[Parts]:
    """Processes, all of which end with the block."""
    made = Parts(commands, log, api)
    try:
        yield made
    finally:
        for name in list(made.running):
            made.kill(name)


def pushed(folder: Path) -> list[RolloutGroup]:
    """All groups of the run, in shards and in the queue, in order."""
    files = {*folder.glob("rollouts/*/.groups/*/group-*.parquet")}
    groups = [group for file in files for group in groups_of(decode_shard(file.read_bytes()))]
    return sorted(groups, key=lambda group: group.group_id)


def content(group: RolloutGroup) -> str:
    """The tokens of a group as the environment notes them; no two groups have the same."""
    tokens = [rollout.token_ids.tolist() for rollout in group.rollouts]
    return json.dumps(tokens, separators=(",", ":"))


def journal_of(path: Path) -> dict[str, Counter[str]]:
    """The groups that were sent and those that were acknowledged, with how often."""
    counts: dict[str, Counter[str]] = {"sent": Counter(), "acknowledged": Counter()}
    for line in path.read_text().splitlines():
        what, tokens = line.split()
        counts[what][tokens] += 1
    return counts


def checked(run: Run, journal: Path) -> dict[str, Counter[str]]:
    """Groups that environments sent; those that are trained on are committed, each once."""
    folder = Path(run.config.root) / run.run_id
    trained = [
        group
        for round in range(ROUNDS)
        for shard in range(run.config.rollouts.shards_per_round)
        for group in groups_of(decode_shard(run.store.read(shard_key(round, shard))))
    ]
    committed = Counter(map(content, pushed(folder)))
    counts = journal_of(journal)
    sizes = {name: len(count) for name, count in counts.items()}
    print(f"{sizes}, {len(committed)} committed, {len(trained)} trained")
    assert set(committed.values()) == {1}
    assert set(committed) <= set(counts["sent"])
    assert len(trained) == ROUNDS * run.config.rollouts.groups_per_round
    assert Counter(map(content, trained)).total() == len(set(map(content, trained)))
    assert set(map(content, trained)) <= set(committed)
    assert all(audit.balanced for audit in audit_run(run))
    faults = check_run(run.config.root, run.run_id).faults
    assert {fault.kind for fault in faults} <= {"leftover"}, faults
    return counts | {"committed": committed}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_groups_of_atropos_survive_kills_of_every_process(
    api: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = interpreter_with(Path(request.config.cache.mkdir("libraries")) / "atropos", ATROPOS)
    tokenizer, journal, logs = tmp_path / "tokenizer", tmp_path / "journal", tmp_path / "logs"
    character_tokenizer().save_pretrained(tokenizer)
    logs.mkdir()
    pushing, sampling = free_port(), free_port()
    settings = [
        f"root={tmp_path}", f"rounds={ROUNDS}", f"inference.port={sampling}",
        "rollouts.source=pushed", "batching.staleness_rounds_max=4",
        "objective.importance_correction=truncated",
    ]  # fmt: skip
    options = [text for setting in settings for text in ("--set", setting)]
    program = [sys.executable, "-m", "marin_rl"]
    spell = str(REPOSITORY / "tests/flows/atropos_spell.py")
    addresses = [f"http://127.0.0.1:{pushing}", f"http://127.0.0.1:{sampling}/v1"]
    commands = {
        "server": [*program, "serve-trajectories", str(DEBUG), *options, "--port", str(pushing)],
        "run": [*program, "run", str(DEBUG), *options],
        "environment": [str(python), spell, *addresses, str(tokenizer), str(journal)],
    }
    folder = tmp_path / "debug"
    with parts(commands, logs, api) as three:
        three.start("server")
        three.start("run")
        three.wait_until(lambda: (folder / "checkpoints/round-00000/manifest.json").exists())
        three.start("environment")
        three.wait_until(lambda: len(pushed(folder)) >= 2)
        three.kill("server")
        three.start("server")
        three.wait_until(lambda: (folder / "rollouts/round-00000/manifest.json").exists())
        three.kill("environment")
        three.start("environment")
        three.wait_until(lambda: (folder / "batches/round-00001").exists())
        three.kill("run")
        three.kill("server")
        three.start("run")
        three.start("server")
        three.wait_until(lambda: three.running["run"].poll() is not None)
        assert three.running["run"].returncode == 0, three.said()
    run = Run.create_or_open(load_config(DEBUG, settings))
    counts = checked(run, journal)
    assert set(counts["acknowledged"]) <= set(counts["committed"])
    # groups come scored, and with the ids that are committed
    note("atropos", "runs", "group rewards", "exact ids", python=python, package="atroposlib")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_batches_of_an_api_server_survive_kills_of_every_process(
    api: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = interpreter_with(Path(request.config.cache.mkdir("libraries")) / "atropos", ATROPOS)
    tokenizer, journal, logs = tmp_path / "tokenizer", tmp_path / "journal", tmp_path / "logs"
    character_tokenizer().save_pretrained(tokenizer)
    logs.mkdir()
    queue, sampling = free_port(), free_port()
    settings = [
        f"root={tmp_path}", f"rounds={ROUNDS}", f"inference.port={sampling}",
        "rollouts.source=pushed", "batching.staleness_rounds_max=4",
        "objective.importance_correction=truncated",
    ]  # fmt: skip
    options = [text for setting in settings for text in ("--set", setting)]
    program = [sys.executable, "-m", "marin_rl"]
    spell = [str(python), str(REPOSITORY / "tests/flows/atropos_spell.py")]
    addresses = [f"http://127.0.0.1:{queue}", f"http://127.0.0.1:{sampling}/v1"]
    environment = [*spell, *addresses, str(tokenizer), str(journal)]
    serve = [str(python), "-m", "uvicorn", "atroposlib.api.server:app", "--port", str(queue)]
    commands = {
        "server": serve,
        "poller": [*program, "poll-trajectories", str(DEBUG), *options, "--url", addresses[0]],
        "run": [*program, "run", str(DEBUG), *options],
        "environment": environment,
        "environment 2": environment,
    }
    folder = tmp_path / "debug"
    batches = folder / "rollouts/.environments"
    with parts(commands, logs, api) as five:
        for name in commands:
            five.start(name)
        five.wait_until(lambda: len(list(batches.glob("batch-*.json"))) >= 1)
        five.kill("poller")
        five.start("poller")
        five.wait_until(lambda: (folder / "rollouts/round-00000/manifest.json").exists())
        five.kill("environment")
        five.start("environment")
        five.kill("server")  # with its queue: what it had not handed out is lost with it
        five.start("server")
        five.wait_until(lambda: (folder / "batches/round-00001").exists())
        five.kill("run")
        five.start("run")
        five.wait_until(lambda: five.running["run"].poll() is not None)
        assert five.running["run"].returncode == 0, five.said()
        five.wait_until(lambda: five.running["poller"].poll() is not None)
        assert five.running["poller"].returncode == 0, five.said()
    run = Run.create_or_open(load_config(DEBUG, settings))
    counts = checked(run, journal)
    popped = [
        group
        for file in batches.glob("batch-*.json")
        for group in json.loads(file.read_text())["batch"]
    ]
    names = {json.dumps(group["tokens"], separators=(",", ":")) for group in popped}
    assert names == set(counts["committed"])  # whatever was handed out is in the run
    assert {file.name[:6] for file in batches.glob("environment-*.json")}
