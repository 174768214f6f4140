"""The names of slots and objects: from rounds, shards and steps to keys, and back."""

import re
from dataclasses import dataclass
from functools import cached_property

# Kinds of slots that a policy can start from, each with an example of a name.
POLICY_SLOTS = {
    "checkpoints": "round-00012", "sft": "step-00500", "preference": "step-00200",
}  # fmt: skip

# The dot keeps the groups out of what `rollouts/*/shard-*.parquet` matches for other readers.
STREAM = "rollouts/.stream"  # groups that wait for the round that takes them
PARTIAL = "partial-"  # of the names of objects with parts of unfinished groups
PUSHING = "rollouts/.environments"  # registrations and batches of groups that are pushed

# Names of parts within their slots begin with these.
BATCHES_PREFIX = "batches-"
DISPOSITIONS_PREFIX = "dispositions-"
SCORES_PREFIX = "scores-"

LEARNING_CURVE = "learning-curve.png"  # pictures and pages of a run that are made again at will
REPORT = "report.html"

_FIELD = re.compile(r"\\\{:0(\d)d\\\}")  # of an escaped template


@dataclass(frozen=True)
class KeyForm:
    """Keys with numbers in them: a call makes one, `numbers` reads one."""

    template: str

    def __call__(self, *numbers: int) -> str:
        assert all(number >= 0 for number in numbers), f"numbers count from 0, found {numbers}"
        return self.template.format(*numbers)

    def numbers(self, key: str) -> tuple[int, ...] | None:
        match = self._pattern.fullmatch(key)
        return None if match is None else tuple(map(int, match.groups()))

    def first(self, key: str) -> int | None:
        numbers = self.numbers(key)
        return None if numbers is None else numbers[0]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        # At least as many digits as names are padded to: a run may outgrow them.
        return re.compile(_FIELD.sub(r"(\\d{\1,})", re.escape(self.template)))


# `round-00012`: never `round=12`, which readers would take for a Hive column.
round_name = KeyForm("round-{:05d}")

rollouts_slot = KeyForm("rollouts/round-{:05d}")
batches_slot = KeyForm("batches/round-{:05d}")
# The policy that a round samples from; round 0 is where the run starts.
checkpoint_slot = KeyForm("checkpoints/round-{:05d}")
evals_slot = KeyForm("evals/round-{:05d}")  # of checkpoint N
intake_slot = KeyForm("intakes/round-{:05d}")  # groups of the stream that a round takes and drops
sft_slot = KeyForm("sft/step-{:05d}")
reward_model_slot = KeyForm("reward_model/step-{:05d}")
preference_slot = KeyForm("preference/step-{:05d}")

# Objects that are commits of their own.
shard_key = KeyForm("rollouts/round-{:05d}/shard-{:04d}.parquet")
metrics_key = KeyForm("metrics/round-{:05d}.parquet")

# Private objects of the stream: groups, parts of unfinished ones, and who samples which chunk.
stream_key = KeyForm(f"{STREAM}/group-{{:08d}}.parquet")
partial_key = KeyForm(f"{STREAM}/{PARTIAL}group-{{:08d}}-{{:02d}}.parquet")
claim_key = KeyForm(f"{STREAM}/claim-{{:08d}}-{{:02d}}.json")
_pack_key = KeyForm(f"{STREAM}/groups-{{:08d}}-{{:08d}}-{{:02d}}.parquet")

# Private objects of pushed groups: environments, and batches as a server handed them out.
environment_key = KeyForm(f"{PUSHING}/environment-{{:05d}}.json")
popped_batch_key = KeyForm(f"{PUSHING}/batch-{{:05d}}.json")

shard_of = KeyForm("shard-{:04d}.parquet").first
metrics_round_of = metrics_key.first
step_of = KeyForm("step-{:05d}").first
stream_group_of = stream_key.first
partial_of = partial_key.first
popped_batch_of = popped_batch_key.first
claim_of = claim_key.numbers

_PIECE = re.compile(
    r"\.groups/(shard-\d{4,})-[0-9a-f]{16}/(?:partial-)?group-(\d{5,})-\d{2,}\.parquet"
)


def round_of(name: str) -> int | None:
    """The round that a folder or file is named for: `round-00012`, `round-00012.parquet`."""
    # The whole name: `round-00012-copy` in a folder is not a round.
    return round_name.first(name.partition(".")[0])


def base_slot() -> str:
    return "base"


def pairs_slot() -> str:
    return "pairs"


def code_key(digest: str) -> str:
    return f"code/{digest}.py"


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
    """The shard that collects a piece of a round's rollouts; None for other objects."""
    match = _PIECE.fullmatch(name)
    return f"{match[1]}.parquet" if match else None


def group_of_piece(name: str) -> int | None:
    """The group that an object of a round's rollouts is a piece of; None for other objects."""
    match = _PIECE.fullmatch(name)
    return int(match[2]) if match else None


def pack_key(numbers: range, sequence: int) -> str:
    """The private object of several groups of the stream, which are among `numbers`."""
    return _pack_key(numbers[0], numbers[-1], sequence)


def pack_of(key: str) -> range | None:
    """The numbers among which a key of the stream has its groups; None for other keys."""
    match _pack_key.numbers(key):
        case (first, last, _):
            return range(first, last + 1)
    return None


def numbers_in(key: str) -> range:
    """The numbers among which an object of a stream has finished groups: none where it has none."""
    number = stream_group_of(key)
    return range(number, number + 1) if number is not None else pack_of(key) or range(0)
