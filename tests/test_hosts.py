"""A run over several processes of this machine: equal parameters, deaths, and bad input."""

import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.cases import printed_seed

from flows.server import free_port
from marin_rl.commands.hosts import COORDINATOR, PROCESS_ID, PROCESSES
from marin_rl.storage.commits import manifest_of
from marin_rl.storage.runs import Run, batches_slot, checkpoint_slot, committed, rollouts_slot
from marin_rl.storage.tables.batches import read_batches
from marin_rl.storage.tables.metrics import read_metrics
from marin_rl.tokenizers import tokenizer_for
from marin_rl.training.policy_source import read_trained
from marin_rl.training.state import template_of

pytestmark = pytest.mark.slow

COMMAND = (sys.executable, "-P", "-m", "marin_rl")
ROUNDS = 2
END_S = 60.0  # within which all processes have ended after a death
DEBUG = yaml.safe_load((Path(__file__).parents[1] / "configs/debug.yaml").read_text())
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The debug run on a mesh, with rewards that differ within every group."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "rewards.py").write_text(
        "def graded(example, completion):\n    return sum(map(ord, completion)) % 7 / 7\n"
    )
    rows = [json.dumps({"prompt": f"say {n}"}) for n in range(8)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    options = {"path": "prompts.jsonl", "reward": "rewards.py:graded", "eval_fraction": 0.5}
    sizes = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 4, "intermediate_size": 64}
    tree = {
        **DEBUG,
        "run_id": "hosts",
        "rounds": ROUNDS,
        "policy": {**DEBUG["policy"], "model": sizes},
        "environment": {"name": "chat", "options": options},
        "batching": {**DEBUG["batching"], "sequences_per_step": 8},
        "mesh": {"fsdp": -1},
    }
    (folder / "marin_rl").mkdir()  # which no process may take for ours
    (folder / "marin_rl/__init__.py").write_text("raise SystemExit(7)")
    file = folder / "hosts.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.fixture(scope="module")
def environment(prefect_url: str) -> dict[str, str]:
    return {**os.environ, "PREFECT_API_URL": prefect_url, "JAX_PLATFORMS": "cpu"}


def launched(count: int, devices: int, *words: str) -> list[str]:
    return [*COMMAND, "launch", "-n", f"{count}", "--devices-per-process", f"{devices}", *words]


@pytest.fixture(scope="module")
def launch(config: Path, environment: Mapping[str, str]) -> Launch:
    def launch(count: int, devices: int, root: Path, *words: str) -> Any:
        command = launched(count, devices, "run", str(config), "--root", str(root), *words)
        return subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            cwd=config.parent,
        )

    return launch


def checked(root: Path, environment: Mapping[str, str]) -> Run:
    """The run below a root, whole and balanced."""
    for command in ("fsck", "audit"):
        words = [*COMMAND, command, "hosts", "--root", str(root)]
        subprocess.run(words, env=environment, check=True, capture_output=True)
    return Run.open(str(root), "hosts")


def digests(run: Run) -> list[str]:
    refs = [committed(run, checkpoint_slot(number)) for number in range(ROUNDS + 1)]
    return [manifest_of(run.store, ref).extra["parameters_digest"] for ref in refs if ref]


def facts(run: Run) -> dict[str, str]:
    ref = committed(run, checkpoint_slot(ROUNDS))
    assert ref is not None
    machine = manifest_of(run.store, ref).extra["machine"]
    return {name: machine[name] for name in ("mesh", "processes")}


def parameters(run: Run, number: int) -> Mapping[str, np.ndarray]:
    ref, policy = committed(run, checkpoint_slot(number)), run.config.policy
    assert ref is not None
    return read_trained(run, ref, template_of(policy, tokenizer_for(policy)))


def first_batches(run: Run) -> Sequence[Any]:
    ref = committed(run, batches_slot(0))
    assert ref is not None
    return list(read_batches(run, ref))


@pytest.fixture(scope="module")
def two_by_two(launch: Launch, environment: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("two")
    done = launch(2, 2, root)
    assert done.returncode == 0, done.stderr
    assert "[1] " not in done.stdout  # process 0 is plain, and the others are on standard error
    return checked(root, environment)


@pytest.fixture(scope="module")
def one_by_four(launch: Launch, environment: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("one")
    assert launch(1, 4, root).returncode == 0
    return checked(root, environment)


@pytest.mark.bits
def test_processes_train_what_one_process_trains_on_the_same_mesh(
    two_by_two: Run, one_by_four: Run, launch: Launch, environment: Any, tmp_path: Path
):
    runs = list[Run]()
    for count in (1, 4, 4):
        root = tmp_path / f"{len(runs)}"
        assert launch(count, 8 // count, root).returncode == 0
        runs.append(checked(root, environment))
    expected = first_batches(one_by_four)
    assert np.std(np.concatenate([batch.advantages.ravel() for batch in expected])) > 0.05
    assert digests(runs[-1]) == digests(runs[-2])
    for run, count in zip([one_by_four, two_by_two, *runs], (1, 2, 1, 4, 4), strict=True):
        assert facts(run) == {"mesh": f"fsdp {8 if run in runs else 4}", "processes": f"{count}"}
        for batch, other in zip(expected, first_batches(run), strict=True):
            for name in ("token_ids", "loss_mask", "advantages"):
                np.testing.assert_array_equal(getattr(batch, name), getattr(other, name))
        for number in range(ROUNDS + 1):
            ours, theirs = parameters(run, number), parameters(one_by_four, number)
            for name, array in theirs.items():
                np.testing.assert_allclose(ours[name], array, rtol=0, atol=1e-6)
    moved = parameters(one_by_four, 0), parameters(one_by_four, ROUNDS)
    assert max(np.abs(moved[0][name] - moved[1][name]).max() for name in moved[0]) > 1e-4


@pytest.mark.bits
def test_processes_that_share_rows_train_what_others_do(
    one_by_four: Run, launch: Launch, environment: Any, tmp_path: Path
):
    done = launch(2, 2, tmp_path, "--set", "mesh.fsdp=2", "--set", "mesh.context=2")
    assert done.returncode == 0, done.stderr
    run = checked(tmp_path, environment)
    assert facts(run)["mesh"] == "fsdp 2, context 2"
    for batch, other in zip(first_batches(run), first_batches(one_by_four), strict=True):
        for name in ("token_ids", "loss_mask", "advantages"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(other, name))
    theirs = parameters(one_by_four, ROUNDS)
    for name, array in parameters(run, ROUNDS).items():
        np.testing.assert_allclose(array, theirs[name], rtol=0, atol=1e-6)


@pytest.mark.bits
def test_the_same_number_of_processes_gives_the_same_bits(
    two_by_two: Run, launch: Launch, tmp_path: Path
):
    done = launch(2, 2, tmp_path, "--json")
    assert json.loads(done.stdout)["trained"] == ROUNDS  # nothing else is on standard output
    assert digests(Run.open(str(tmp_path), "hosts")) == digests(two_by_two)


def test_replay_names_another_number_of_processes(two_by_two: Run, environment: Any):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    root = two_by_two.store.url.removesuffix("/hosts")
    words = ["replay-step", "hosts", "--round", "0", "--root", root, "--json"]
    done = subprocess.run(
        [*COMMAND, *words],
        env={**environment, **flags},
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout)["changed"]["processes"] == ["2", "1"]


def test_another_number_of_processes_goes_on_and_every_command_reads_the_shards(
    two_by_two: Run, launch: Launch, environment: Any, tmp_path: Path
):
    states = list[Mapping[str, np.ndarray]]()
    for count in (1, 4):
        root = tmp_path / f"{count}"
        shutil.copytree(two_by_two.store.url, root / "hosts")
        done = launch(count, 4 // count, root, "--rounds", f"{ROUNDS + 1}")
        assert done.returncode == 0, done.stderr
        run = checked(root, environment)
        assert digests(run) == digests(two_by_two)
        states.append(parameters(run, ROUNDS + 1))
    for name, array in states[0].items():
        np.testing.assert_allclose(states[1][name], array, rtol=0, atol=1e-6)
    root, archive = ("--root", str(tmp_path / "4")), str(tmp_path / "hosts.tar")
    for words in (
        ("export", "hosts", *root, "--hf", str(tmp_path / "hf")),
        ("export", "hosts", *root, "--all", "--output", archive),
        ("verify", archive),
        ("fork", "hosts", *root, "--round", "1", "--run-id", "forked"),
        ("gc", "hosts", *root, "--keep-last", "2"),
        ("fsck", "hosts", *root),
    ):
        done = subprocess.run(
            [*COMMAND, *words],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (words, done.stdout, done.stderr)


def test_a_process_whose_part_is_lost_is_told_the_file(
    two_by_two: Run, launch: Launch, environment: Any, tmp_path: Path
):
    shutil.copytree(two_by_two.store.url, tmp_path / "hosts")
    (lost,) = (tmp_path / "hosts" / checkpoint_slot(ROUNDS)).glob("*/arrays-00001-*")
    lost.unlink()
    done = launch(2, 2, tmp_path, "--rounds", f"{ROUNDS + 1}")
    assert done.returncode == 1
    assert f"{lost} does not exist" in "".join(done.stderr.split("\n"))


def test_reward_models_and_preferences_train_over_processes(
    config: Path, environment: Any, tmp_path: Path
):
    pairs = [{"prompt": f"say {n}", "chosen": f"a{n}", "rejected": f"b{n % 3}"} for n in range(16)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    file, steps = tmp_path / "pairs.jsonl", {"steps": 2, "steps_per_checkpoint": 1}
    section = json.dumps({"pairs": str(file), "pairs_per_step": 4, "microbatch_pairs": 4, **steps})
    ends = list[list[str]]()
    for count in (2, 1):
        root = tmp_path / f"runs-{count}"
        for command, key in (("reward-model", "reward_model"), ("preference", "preference")):
            words = [command, str(config), "--root", str(root), "--run-id", command, "--json"]
            words += ["--set", f"{key}={section}"]
            done = subprocess.run(
                launched(count, 4 // count, *words),
                env=environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            ends.append(sorted(json.loads(done.stdout)))
    assert ends[:2] == ends[2:]


def children(parent: "subprocess.Popen[Any]") -> list[int]:
    return [*map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())]


# Files and folders after whose appearance a process is killed, in the order of a run; None: soon
# after the start. A folder of a checkpoint is there once its first file is being written.
MOMENTS = (
    None, None, checkpoint_slot(0), f"{checkpoint_slot(0)}/manifest.json",
    f"{rollouts_slot(0)}/shard-0000.parquet", f"{batches_slot(0)}/manifest.json",
    checkpoint_slot(1), f"{checkpoint_slot(1)}/manifest.json", f"{batches_slot(1)}/manifest.json",
    checkpoint_slot(2),
)  # fmt: skip


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_all_and_the_same_command_goes_on(
    victim: int,
    two_by_two: Run,
    config: Path,
    launch: Launch,
    environment: Any,
    tmp_path: Path,
):
    rng, said = random.Random(printed_seed()), tmp_path / "said"
    for moment in MOMENTS:
        longest = 10.0 if moment is None else 0.03 if moment.count("/") == 1 else 0.2
        with said.open("w") as output:
            command = launched(2, 2, "run", str(config), "--root", str(tmp_path))
            parent = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            while moment is not None and not (tmp_path / "hosts" / moment).exists():
                assert parent.poll() is None, said.read_text()
                time.sleep(0.001)
            while len(alive := children(parent)) < 2:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, longest))
            assert parent.poll() is None, f"the run ended before it was disturbed at {moment}"
            os.kill(alive[victim], signal.SIGKILL)
            assert parent.wait(END_S) == 128 + signal.SIGKILL
        assert f"process {victim} of 2 was killed by SIGKILL" in said.read_text()
        assert not any(Path(f"/proc/{child}").exists() for child in alive)
    done = launch(2, 2, tmp_path)
    assert done.returncode == 0, done.stderr
    assert digests(checked(tmp_path, environment)) == digests(two_by_two)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_as_it_ends_one(
    sign: signal.Signals, config: Path, environment: Any, tmp_path: Path
):
    command = launched(2, 1, "run", str(config), "--root", str(tmp_path), "--rounds", "50")
    parent = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "hosts" / batches_slot(1) / "manifest.json").exists():
        assert parent.poll() is None
        time.sleep(0.01)
    alive = children(parent)
    parent.send_signal(sign)
    _, said = parent.communicate(timeout=END_S)
    assert parent.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert not any(Path(f"/proc/{child}").exists() for child in alive)


def by_hand(
    config: Path, environment: Mapping[str, str], root: Path, second: Mapping[str, Any]
) -> list["subprocess.Popen[str]"]:
    """Two processes, started one by one; `second` says what 1 differs in.

    That is `words` of its command, `environment`, or `Popen`'s `cwd` or `preexec_fn`.
    """
    place, started = f"127.0.0.1:{free_port()}", list[subprocess.Popen[str]]()
    for number, own in enumerate((dict[str, Any](), dict(second))):
        words = [*COMMAND, "run", str(config), "--root", str(root), *own.pop("words", ())]
        of_all = {COORDINATOR: place, PROCESSES: "2", PROCESS_ID: f"{number}"}
        variables = {**environment, **of_all, **own.pop("environment", {})}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        own = {"cwd": config.parent, **own}
        started.append(subprocess.Popen(words, env=variables, text=True, **pipes, **own))
    return started


def ends(started: list["subprocess.Popen[str]"]) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    said = [process.communicate(timeout=300)[0] for process in started]
    return [(p.returncode, " ".join(text.split())) for p, text in zip(started, said, strict=True)]


@pytest.mark.parametrize("moment", [checkpoint_slot(0), batches_slot(0)])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_without_a_parent_ends_with_a_sentence_on_the_lost_one(
    victim: int, moment: str, config: Path, environment: Any, tmp_path: Path
):
    quiet = {name: text for name, text in environment.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    started = by_hand(config, quiet, tmp_path, {})
    while not (tmp_path / "hosts" / moment).exists():
        assert all(process.poll() is None for process in started), ends(started)
        time.sleep(0.001)
    started[victim].kill()
    started[1 - victim].wait(END_S)
    code, said = ends(started)[1 - victim]
    told = said.rpartition("ProcessLost: ")[2]
    assert (code, told.startswith(f"process {victim} has ended")) == (1, True), said
    assert told.endswith("all end, and the same command goes on from what is committed")
    assert "coordination" not in said  # as the trace of C++ has it
    if victim == 0:
        assert said == f"ProcessLost: {told}"


def changed_copy(folder: Path) -> Path:
    """A folder with this package, with a line more, and a later version of a library."""
    package = Path(__file__).parents[1]
    for name in ("marin_rl", "schemas", "flows", "tasks"):
        shutil.copytree(package / name, folder / name)
    with (folder / "marin_rl/errors.py").open("a") as file:
        file.write("# changed\n")
    (folder / "gcsfs-3000.1.dist-info").mkdir()
    (folder / "gcsfs-3000.1.dist-info/METADATA").write_text("Name: gcsfs\nVersion: 3000.1\n")
    return folder


# By what process 1 differs in: see `by_hand`; and words of the error.
OTHERS: Mapping[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "configuration": (
        {"words": ("--set", "sampling.temperature=0.7")},
        ["process 1 is not like process 0: it has sampling.temperature 0.7, expected 1.0"],
    ),
    "root": (
        {"words": ("--root", "/proc/nowhere")},
        ["process 1: RootUnfit: /proc/nowhere cannot hold runs"],
    ),
    "number of devices": (
        {"environment": {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}},
        ["process 1 is not like process 0: it has devices '3 x cpu', expected '2 x cpu'"],
    ),
    "no device": (
        {"environment": {"JAX_PLATFORMS": "cuda"}},
        ["process 1: DeviceUnfit: JAX could not start the GPU of this machine"],
    ),
    "code": (
        {},
        ["process 1 is not like process 0: it has code", "library gcsfs '3000.1', expected"],
    ),
    "data": ({}, ["process 1 is not like process 0: it has content of environment.options.path"]),
}


@pytest.mark.parametrize("which", OTHERS)
def test_a_process_that_differs_is_named(
    which: str, config: Path, environment: Any, tmp_path: Path
):
    second, expected = OTHERS[which]
    if which == "code":
        second = {"environment": {"PYTHONPATH": str(changed_copy(tmp_path))}}
    if which == "data":
        text = config.read_text().replace("prompts.jsonl", "/proc/self/cwd/prompts.jsonl")
        config = config.with_name("data.yaml")
        config.write_text(text)
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "another"}\n{"prompt": "one"}\n')
        second = {"cwd": tmp_path}
    (code, said), other = ends(by_hand(config, environment, tmp_path / "runs", second))
    assert not [words for words in expected if words not in said], said
    assert (code, other) == (2, (2, ""))
    assert not list((tmp_path / "runs").glob("hosts/*"))


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # of a child with a limit, after JAX
def test_a_process_that_cannot_write_is_named_and_the_same_command_goes_on(
    two_by_two: Run, launch: Launch, config: Path, environment: Any, tmp_path: Path
):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    own = {"preexec_fn": limited, "environment": {"MARIN_RL_COMPILATION_CACHE": ""}}
    two = {**environment, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    (code, said), (other, quiet) = ends(by_hand(config, two, tmp_path, own))
    assert (code, other) == (1, 1)
    assert "ProcessLost: process 1: StorageError: cannot write" in said
    assert "arrays-00001-00000.safetensors: the file would be larger than" in said
    assert "Error" not in quiet
    assert launch(2, 2, tmp_path).returncode == 0
    assert digests(checked(tmp_path, environment)) == digests(two_by_two)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["mesh.fsdp=3"], "does not fit 4 devices of 2 process(es): make their product equal"),
        (
            ["mesh.context=2", "mesh.fsdp=2", "batching.length_buckets=[62]"],
            "expected batching.length_buckets in multiples of 4, found 62",
        ),
        (["mesh.fsdp=2"], "does not fit 4 devices of 2 process(es): make their product equal"),
        (
            ["mesh.tensor=2", "policy.model.kv_heads=1"],
            "mesh.tensor is 2, but axis kv_head of transformer/layers/stacked/self_attn/q_proj/",
        ),
        (
            [f"policy.model.{size}" for size in ("hidden_size=30", "heads=3", "kv_heads=3")],
            "mesh.fsdp is 4, but axis embed of",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(
    settings: Sequence[str], expected: str, launch: Launch, tmp_path: Path
):
    done = launch(2, 2, tmp_path, *(f"--set={setting}" for setting in settings))
    assert done.returncode == 2
    assert expected in " ".join(done.stderr.split())
    assert "[1] ConfigError" not in done.stderr


@pytest.mark.parametrize(
    ("key", "further"),
    [("policy.quantize_base=nf4", "policy.lora.rank=2"), ("asynchrony.max_staleness=1", "seed=1")],
)
def test_keys_that_processes_cannot_honour_are_refused(
    key: str, further: str, launch: Launch, tmp_path: Path
):
    data = ("--set", "mesh.fsdp=1", "--set", "mesh.data=2")
    done = launch(2, 1, tmp_path, "--set", key, "--set", further, *data)
    assert done.returncode == 2
    assert key.partition("=")[0] in done.stderr
    assert "several processes cannot do" in " ".join(done.stderr.split())


def own_address() -> str:
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return probe.getsockname()[0]
    return pytest.skip("this machine has no network")


def met_beyond_loopback(
    config: Path, environment: Any, root: Path, **of_first: str
) -> list["subprocess.Popen[str]"]:
    """Two processes of two devices; `of_first` are variables of process 0 alone."""
    shared = {
        **environment,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        COORDINATOR: f"{own_address()}:{free_port()}",
        PROCESSES: "2",
    }
    words, pair = [*COMMAND, "run", str(config), "--root", str(root)], []
    for number in range(2):
        own = shared | {PROCESS_ID: f"{number}"} | ({} if number else of_first)
        with (root / f"said-{number}").open("w") as said:
            pair.append(subprocess.Popen(words, env=own, stderr=said, text=True, cwd=config.parent))
    return pair


def test_a_process_without_the_token_of_the_first_is_named(
    config: Path, environment: Any, tmp_path: Path
):
    pair = met_beyond_loopback(config, environment, tmp_path, MARIN_RL_API_KEY="token")
    assert [process.wait(120) for process in pair] == [2, 2]
    said = " ".join((tmp_path / "said-0").read_text().split())
    assert "it has variable MARIN_RL_API_KEY 'not set', expected 'set'" in said


def test_every_process_samples_also_where_hosts_meet_beyond_loopback(
    two_by_two: Run, config: Path, environment: Any, tmp_path: Path
):
    """Their servers ask for a token that process 0 has made. Its clock is two days ahead."""
    ahead = "import time\nnow = time.time\ntime.time = lambda: now() + 172_800\n"
    (tmp_path / "sitecustomize.py").write_text(ahead)
    pair = met_beyond_loopback(config, environment, tmp_path, PYTHONPATH=str(tmp_path))
    assert [process.wait(300) for process in pair] == [0, 0]
    run = checked(tmp_path, environment)
    assert digests(run) == digests(two_by_two)
    (measured,) = read_metrics(run, [0]).to_pylist()
    assert measured["weights/transfers_per_step"] * len(first_batches(run)) == 2


def test_a_coordinator_that_nobody_can_reach(config: Path, environment: Any, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        shared = {**environment, COORDINATOR: f"127.0.0.1:{port}", PROCESSES: "2"}
        words = [*COMMAND, "run", str(config), "--root", str(tmp_path)]
        begun = subprocess.run(
            words, env={**shared, PROCESS_ID: "0"}, capture_output=True, text=True, check=False
        )
    assert begun.returncode == 2
    assert f"process 0 cannot listen at distributed.coordinator, port {port}" in begun.stderr
    for number, expected in ((1, "process 0 or its coordinator did not come"), (0, "2 processes")):
        alone = subprocess.run(
            [*words, "--set", "distributed.timeout_s=3"],
            env={**shared, PROCESS_ID: f"{number}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert alone.returncode == 2
        said = " ".join(alone.stderr.split())
        assert f"process {number}: {expected}" in said
        assert "within 3 s (distributed.timeout_s)" in said


def test_the_doctor_examines_every_process(config: Path, environment: Any, tmp_path: Path):
    words = ["doctor", str(config), "--root", str(tmp_path)]
    done = subprocess.run(
        launched(2, 2, *words), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 x cpu" in done.stdout


def test_only_commands_of_all_processes_are_launched(environment: Any):
    done = subprocess.run(
        launched(2, 1, "status", "hosts"), env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "expected one of the commands run, sft, reward-model, preference, doctor" in " ".join(
        done.stderr.split()
    )
