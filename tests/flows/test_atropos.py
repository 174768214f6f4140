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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.flow_runs import DEBUG, REPOSITORY
from support.libraries import interpreter_with

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
RESET = "it is reset, and those groups are lost"  # from the poller
TAKEN = '"POST /scored_data HTTP/1.1" 200'  # a group that an API server took, in its log


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

    @contextmanager
    def paused(self, *names: str) -> Iterator[None]:
        """Stop processes within the block, as they stand."""
        for name in names:
            self.running[name].send_signal(signal.SIGSTOP)
        yield
        for name in names:
            self.running[name].send_signal(signal.SIGCONT)

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


def answers(url: str) -> bool:
    """True where something answers at a URL."""
    with suppress(httpx.HTTPError):
        return httpx.get(url).status_code == 200
    return False


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


@dataclass(frozen=True, slots=True)
class Setting:
    """A run whose groups come from atropos: its folder, its settings, and what processes run."""

    folder: Path
    python: Path
    settings: list[str]
    queue: str
    sampling: str

    @property
    def journal(self) -> Path:
        """File in which environments note the groups that they sent."""
        return self.folder / "journal"

    @property
    def run_folder(self) -> Path:
        """The run's files."""
        return self.folder / "debug"

    def ours(self, command: str, *options: str) -> list[str]:
        """A command of marin-rl on the run."""
        settings = [text for setting in self.settings for text in ("--set", setting)]
        return [sys.executable, "-m", "marin_rl", command, str(DEBUG), *settings, *options]

    def environment(self) -> list[str]:
        """An environment, which pushes to `queue` what it sampled from the run."""
        program = str(REPOSITORY / "tests/flows/atropos_spell.py")
        tokenizer = str(self.folder / "tokenizer")
        addresses = [self.queue, f"{self.sampling}/v1"]
        return [str(self.python), program, *addresses, tokenizer, str(self.journal)]

    def api_server(self) -> list[str]:
        """The API server of atropos's own package."""
        port = self.queue.rpartition(":")[2]
        return [str(self.python), "-m", "uvicorn", "atroposlib.api.server:app", "--port", port]

    @contextmanager
    def parts(self, commands: dict[str, list[str]], api: str) -> Iterator[Parts]:
        """The processes, all of which end with the block."""
        logs = self.folder / "logs"
        logs.mkdir()
        made = Parts(commands, logs, api)
        try:
            yield made
        finally:
            for name in list(made.running):
                made.kill(name)


@pytest.fixture
def setting(tmp_path: Path, request: pytest.FixtureRequest) -> Setting:
    python = interpreter_with(Path(request.config.cache.mkdir("libraries")) / "atropos", ATROPOS)
    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    queue, sampling = free_port(), free_port()
    settings = [
        f"root={tmp_path}", f"rounds={ROUNDS}", f"inference.port={sampling}",
        "rollouts.source=pushed", "batching.staleness_rounds_max=4",
        "objective.importance_correction=truncated",
    ]  # fmt: skip
    urls = (f"http://127.0.0.1:{port}" for port in (queue, sampling))
    return Setting(tmp_path, python, settings, *urls)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_groups_of_atropos_survive_kills_of_every_process(api: str, setting: Setting) -> None:
    commands = {
        "server": setting.ours("serve-trajectories", "--port", setting.queue.rpartition(":")[2]),
        "run": setting.ours("run"),
        "environment": setting.environment(),
        "environment 2": setting.environment(),
    }
    folder = setting.run_folder
    with setting.parts(commands, api) as four:
        four.start("server")
        four.start("run")
        four.wait_until(lambda: (folder / "checkpoints/round-00000/manifest.json").exists())
        four.start("environment")
        four.start("environment 2")
        four.wait_until(lambda: len(pushed(folder)) >= 2)
        four.kill("server")
        four.start("server")
        four.wait_until(lambda: (folder / "rollouts/round-00000/manifest.json").exists())
        four.kill("environment")
        four.start("environment")
        four.wait_until(lambda: (folder / "batches/round-00001").exists())
        four.kill("run")
        four.kill("server")
        four.start("run")
        four.start("server")
        four.wait_until(lambda: four.running["run"].poll() is not None)
        assert four.running["run"].returncode == 0, four.said()
    counts = checked(Run.create_or_open(load_config(DEBUG, setting.settings)), setting.journal)
    assert set(counts["acknowledged"]) <= set(counts["committed"])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_batches_of_an_api_server_survive_kills_of_every_process(
    api: str, setting: Setting
) -> None:
    commands = {
        "server": setting.api_server(),
        "poller": setting.ours("poll-trajectories", "--url", setting.queue),
        "run": setting.ours("run"),
        "environment": setting.environment(),
        "environment 2": setting.environment(),
    }
    folder = setting.run_folder
    batches = folder / "rollouts/.environments"
    with setting.parts(commands, api) as five:
        for name in commands:
            five.start(name)
        five.wait_until(lambda: len(list(batches.glob("batch-*.json"))) >= 1)
        five.kill("poller")
        five.start("poller")
        five.wait_until(lambda: (folder / "rollouts/round-00000/manifest.json").exists())
        five.kill("environment")
        five.start("environment")
        restarted_by_surprise(five, setting)
        five.wait_until(lambda: (folder / "batches/round-00001").exists())
        five.kill("run")
        five.start("run")
        five.wait_until(lambda: five.running["run"].poll() is not None)
        assert five.running["run"].returncode == 0, five.said()
        five.wait_until(lambda: five.running["poller"].poll() is not None)
        assert five.running["poller"].returncode == 0, five.said()
        assert RESET in (setting.folder / "logs/poller.log").read_text()
    counts = checked(Run.create_or_open(load_config(DEBUG, setting.settings)), setting.journal)
    popped = [
        group
        for file in batches.glob("batch-*.json")
        for group in json.loads(file.read_text())["batch"]
    ]
    taken = (setting.folder / "logs/server.log").read_text().count(TAKEN) - 1  # one by hand
    print(f"the API server took {taken}, and handed out {len(popped)}")
    assert len(popped) == len(counts["committed"]) <= taken
    assert len(counts["acknowledged"]) <= taken
    names = {json.dumps(group["tokens"], separators=(",", ":")) for group in popped}
    assert names == set(counts["committed"])  # whatever was handed out is in the run
    assert {file.name[:6] for file in batches.glob("environment-*.json")}


def restarted_by_surprise(five: Parts, setting: Setting) -> None:
    """Kill and start the API server, which is pushed to before it is registered with.

    Such a server answers a registration and does not follow it, until it is reset. What the one
    before had not handed out is lost with it.
    """
    with five.paused("poller", "environment", "environment 2"):
        five.kill("server")
        five.start("server")
        five.wait_until(lambda: answers(setting.queue))
        group = {"tokens": [[5, 6]], "masks": [[-100, 6]], "scores": [0.0]}
        assert httpx.post(f"{setting.queue}/scored_data", json=group).status_code == 200
