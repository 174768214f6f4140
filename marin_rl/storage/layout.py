"""The names of slots: pure functions from rounds, shards and steps to keys, and back."""

import re

# At least as many digits as names are padded to: a run may outgrow them, and is then still read.
_PIECE = re.compile(
    r"\.groups/(shard-\d{4,})-[0-9a-f]{16}/(?:partial-)?group-(\d{5,})-\d{2,}\.parquet"
)
_SHARD = re.compile(r"shard-(\d{4,})\.parquet")
_METRICS = re.compile(r"metrics/round-(\d{5,})\.parquet")
_ROUND = re.compile(r"round-(\d{5,})")
STEP = re.compile(r"step-(\d{5,})")

# The dot keeps the groups out of what `rollouts/*/shard-*.parquet` matches for other readers.
STREAM = "rollouts/.stream"  # groups that wait for the round that takes them
PARTIAL = "partial-"  # of the names of objects with parts of unfinished groups
PUSHING = "rollouts/.environments"  # registrations and batches of groups that are pushed
_STREAMED = re.compile(rf"{re.escape(STREAM)}/group-(\d{{8,}})\.parquet")
_PARTIAL = re.compile(rf"{re.escape(STREAM)}/partial-group-(\d{{8,}})-\d{{2,}}\.parquet")
_PACK = re.compile(rf"{re.escape(STREAM)}/groups-(\d{{8,}})-(\d{{8,}})-\d{{2,}}\.parquet")
_CLAIM = re.compile(rf"{re.escape(STREAM)}/claim-(\d{{8,}})-(\d{{2,}})\.json")
_POPPED = re.compile(rf"{re.escape(PUSHING)}/batch-(\d{{5,}})\.json")

# Names of parts within their slots begin with these.
BATCHES_PREFIX = "batches-"
DISPOSITIONS_PREFIX = "dispositions-"
SCORES_PREFIX = "scores-"

LEARNING_CURVE = "learning-curve.png"  # pictures and pages of a run that are made again at will
REPORT = "report.html"


# Kinds of slots that a policy can start from, each with an example of a name.
POLICY_SLOTS = {"checkpoints": "round-00012", "sft": "step-00500"}


def round_name(round: int) -> str:
    """`round-00012`: never `round=12`, which readers would take for a Hive column."""
    assert round >= 0, f"rounds count from 0, found {round}"
    return f"round-{round:05d}"


def round_of(name: str) -> int | None:
    """The round that a folder or file is named for: `round-00012`, `round-00012.parquet`."""
    # The whole name: `round-00012-copy` in a folder is not a round.
    match = _ROUND.fullmatch(name.partition(".")[0])
    return int(match[1]) if match else None


def rollouts_slot(round: int) -> str:
    """The slot that seals a round's rollouts."""
    return f"rollouts/{round_name(round)}"


def shard_key(round: int, shard: int) -> str:
    """The object that is one shard of a round's rollouts, and its own commit."""
    return f"{rollouts_slot(round)}/shard-{shard:04d}.parquet"


def pieces_folder(round: int, shard: int, fingerprint: str) -> str:
    """The private folder of the groups that are finished while their shard is not."""
    # By the fingerprint, so that pieces of other settings or of another policy are never collected.
    return f"{rollouts_slot(round)}/.groups/shard-{shard:04d}-{fingerprint[:16]}"


def piece_name(group: str, number: int) -> str:
    """The object with members of a group that were finished together, below that folder."""
    return f"{group}-{number:02d}.parquet"


def partial_name(group: str, number: int) -> str:
    """The object with what a piece added to an unfinished group, below that folder."""
    return f"{PARTIAL}{piece_name(group, number)}"


def shard_of_piece(name: str) -> str | None:
    """The shard that collects an object of a round's rollouts; None for what is no piece of one."""
    match = _PIECE.fullmatch(name)
    return f"{match[1]}.parquet" if match else None


def group_of_piece(name: str) -> int | None:
    """The group that an object of a round's rollouts is a piece of; None for other objects."""
    match = _PIECE.fullmatch(name)
    return int(match[2]) if match else None


def shard_of(name: str) -> int | None:
    """The number of the shard that an object of a round's rollouts is; None for other objects."""
    match = _SHARD.fullmatch(name)
    return int(match[1]) if match else None


def stream_key(number: int) -> str:
    """The private object of a group that no round has asked for yet."""
    return f"{STREAM}/group-{number:08d}.parquet"


def partial_key(group: int, number: int) -> str:
    """The private object with what a piece added to an unfinished group of the stream."""
    return f"{STREAM}/{partial_name(f'group-{group:08d}', number)}"


def partial_of(key: str) -> int | None:
    """The number of the group that a key of the stream has a part of; None for other keys."""
    match = _PARTIAL.fullmatch(key)
    return int(match[1]) if match else None


def claim_key(chunk: int, number: int) -> str:
    """The private object by which a worker says that it samples a chunk of such groups."""
    return f"{STREAM}/claim-{chunk:08d}-{number:02d}.json"


def stream_group_of(key: str) -> int | None:
    """The number of the group that a key of the stream is; None for other keys."""
    match = _STREAMED.fullmatch(key)
    return int(match[1]) if match else None


def pack_key(numbers: range, sequence: int) -> str:
    """The private object of several such groups, which are among `numbers`."""
    return f"{STREAM}/groups-{numbers[0]:08d}-{numbers[-1]:08d}-{sequence:02d}.parquet"


def pack_of(key: str) -> range | None:
    """The numbers among which a key of the stream has its groups; None for other keys."""
    match = _PACK.fullmatch(key)
    return range(int(match[1]), int(match[2]) + 1) if match else None


def numbers_in(key: str) -> range:
    """The numbers among which an object of a stream has finished groups: none where it has none."""
    number = stream_group_of(key)
    return range(number, number + 1) if number is not None else pack_of(key) or range(0)


def claim_of(key: str) -> tuple[int, int] | None:
    """Chunk and number of the claim that a key of the stream is; None for other keys."""
    match = _CLAIM.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def intake_slot(round: int) -> str:
    """The slot that says which groups of the stream a round takes and drops."""
    return f"intakes/{round_name(round)}"


def environment_key(number: int) -> str:
    """The private object that registers an environment which pushes groups."""
    return f"{PUSHING}/environment-{number:05d}.json"


def popped_batch_key(number: int) -> str:
    """The private object that keeps a batch as a server of trajectories handed it out."""
    return f"{PUSHING}/batch-{number:05d}.json"


def popped_batch_of(key: str) -> int | None:
    """The number of the batch that such an object keeps; None for other keys."""
    match = _POPPED.fullmatch(key)
    return int(match[1]) if match else None


def batches_slot(round: int) -> str:
    """The slot of a round's training batches and dispositions."""
    return f"batches/{round_name(round)}"


def checkpoint_slot(round: int) -> str:
    """The slot of the policy that round `round` samples from; round 0 is where the run starts."""
    return f"checkpoints/{round_name(round)}"


def sft_slot(step: int) -> str:
    """The slot of the warm start's checkpoint after `step` optimizer steps."""
    return f"sft/step-{step:05d}"


def base_slot() -> str:
    """The slot of the base that a run's adapter is of."""
    return "base"


def pairs_slot() -> str:
    """The slot of the preference pairs that a run's reward model learns from."""
    return "pairs"


def reward_model_slot(step: int) -> str:
    """The slot of the reward model's checkpoint after `step` optimizer steps."""
    return f"reward_model/step-{step:05d}"


def evals_slot(round: int) -> str:
    """The slot of the evaluation of checkpoint `round`."""
    return f"evals/{round_name(round)}"


def code_key(digest: str) -> str:
    """The copy of a file of the user's code, by the file's SHA-256."""
    return f"code/{digest}.py"


def metrics_key(round: int) -> str:
    """The object that holds a round's metrics."""
    return f"metrics/{round_name(round)}.parquet"


def metrics_round_of(key: str) -> int | None:
    """The round whose metrics an object holds; None for other objects."""
    match = _METRICS.fullmatch(key)
    return int(match[1]) if match else None
