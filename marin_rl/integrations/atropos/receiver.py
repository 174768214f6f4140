"""Receiver of pushed groups: registrations, validation, durable commits, and the queue's numbers.

Everything that an answer promises is committed before the answer: an environment's number, and each
group. What is kept in memory alone may be lost: the latest group, the counts of refusals, and which
environments were heard from lately. Methods block and are called one at a time. Leaves out HTTP
(`app`).
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from marin_rl.errors import CorruptObject, InputError, ObjectMissing, StorageError
from marin_rl.inference.client.protocol import served_model_id
from marin_rl.integrations.atropos.scored_data import (
    PushingEnvironment,
    ScoredData,
    check_scored_data,
    check_texts,
    policy_version_of,
    rollout_group,
)
from marin_rl.storage.commits import commit_object, new_attempt, read_manifest, ref_of
from marin_rl.storage.layout import environment_key
from marin_rl.storage.runs import Run, checkpoint_slot, latest_checkpoint, rollouts_slot
from marin_rl.storage.tables.group_queue import GroupQueue
from marin_rl.storage.tables.rollouts import encode_shard
from marin_rl.tokenizers import TokenizerIdentity, tokenizer_for
from marin_rl.types import RolloutGroup, Sampling, ServedPolicy
from schemas.manifests import canonical_json
from schemas.strict_json import parse_json

ENVIRONMENTS_MAX = 4096
# Environments ask for their status ten times a second: the store is looked at less often.
LOOK_S = 0.5
# An environment that was not heard from for so long has no share of the weights.
CONNECTED_S = 60.0
# Groups that wait are on disk, and environments may ignore the size of the queue.
QUEUE_ROUNDS_MAX = 64
WEIGHT_MIN = 0.01  # as atropos has it, so that no environment is starved


class QueueFull(StorageError):
    """Too many groups wait for the trainer."""

    transient = True


class Receiver:
    """Receives the groups of one run, which may be trained by another process meanwhile."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.counts: Counter[str] = Counter(accepted=0, repeated=0, refused=0)
        self.latest: ScoredData | None = None
        self._queue = GroupQueue(run)
        self._queue.open()
        self._environments: list[PushingEnvironment] = []
        self._read_environments()
        self._heard: dict[int, float] = {}
        self._tokenizer: PreTrainedTokenizerBase = tokenizer_for(run.config.policy)
        self._identity = TokenizerIdentity.of(self._tokenizer)
        self._vocabulary = max(len(self._tokenizer), run.config.policy.model.vocab_size or 0)
        self._policies: dict[int, ServedPolicy] = {}
        self._round: int | None = None
        self._sealed = False
        self._looked_at = float("-inf")

    @property
    def round(self) -> int | None:
        # whose policy is the latest; None before the run has one
        self._look()
        return self._round

    @property
    def queue_size(self) -> int:
        return max(0, self._queue.accepted - self._taken())

    def register(self, wanted: dict[str, Any]) -> PushingEnvironment:
        """Commit an environment under the next number. Raises InputError, StorageError."""
        size, found = self.run.config.rollouts.group_size, wanted["group_size"]
        if found != size:
            raise InputError(
                f"group_size: expected {size}, rollouts.group_size of run {self.run.run_id}, "
                f"found {found}"
            )
        if len(self._environments) >= ENVIRONMENTS_MAX:
            raise InputError(f"expected at most {ENVIRONMENTS_MAX} registrations of a run")
        attempt = new_attempt()
        while True:
            same = sum(wanted["name"] == known.name for known in self._environments)
            environment = PushingEnvironment(
                number=len(self._environments), real_name=f"{wanted['name']}_{same}", **wanted
            )
            committed = self._commit(environment, attempt)
            self._environments.append(committed)
            if committed == environment:
                self._heard[environment.number] = time.monotonic()
                return environment

    def environment(self, number: int | None) -> PushingEnvironment:
        """A registered environment, which is heard from now. Raises InputError."""
        # Another server may have registered it.
        if number is not None and number >= len(self._environments):
            self._read_environments()
        if number is None or not 0 <= number < len(self._environments):
            raise InputError(
                "env_id: expected the number of an environment that is registered by "
                f"/register-env, found {number}; there are {len(self._environments)}"
            )
        self._heard[number] = time.monotonic()
        return self._environments[number]

    def named(self, name: str) -> PushingEnvironment | None:
        same = (known for known in self._environments if known.name == name)
        return next(same, None)

    def disconnect(self, number: int) -> None:
        self.environment(number)
        del self._heard[number]

    def accept(self, groups: Sequence[ScoredData]) -> int:
        """Check groups, then commit them in order; return the number of new ones.

        Where one is refused, none is committed. Raises InputError, StorageError; QueueFull.
        """
        config = self.run.config
        # all that may be old, and some more
        rounds = max(QUEUE_ROUNDS_MAX, 2 * (1 + config.batching.staleness_rounds_max))
        most = config.rollouts.groups_per_round * rounds
        if self.queue_size >= most:
            raise QueueFull(
                f"{self.queue_size} groups wait, expected less than {most}: run "
                f"{self.run.run_id} has no use for more until it has trained on some"
            )
        pushed: list[tuple[ScoredData, int, ServedPolicy, Callable[[str], RolloutGroup]]] = []
        try:
            for data in groups:
                environment = self.environment(data.env_id)
                check_scored_data(data, config, self._vocabulary)
                check_texts(data, self._tokenizer.decode)
                policy = self._policy(policy_version_of(data))
                group_at = partial(
                    rollout_group,
                    data,
                    environment=environment,
                    policy=policy,
                    sampling=Sampling(**config.sampling.model_dump()),
                    decode=self._tokenizer.decode,
                )
                _check_stored(data, policy, group_at)
                pushed.append((data, environment.number, policy, group_at))
        except (InputError, OverflowError) as error:
            self.counts["refused"] += len(groups)
            if isinstance(error, OverflowError):
                raise InputError(f"an id of tokens or masks is beyond 64 bits: {error}") from None
            raise
        new = 0
        for data, number, policy, group_at in pushed:
            new += self._queue.append(number, data.digest, policy, group_at)
            self.latest = data
        self.counts["accepted"] += new
        self.counts["repeated"] += len(groups) - new
        return new

    def status_of(self, number: int) -> dict[str, Any]:
        """Return what `/status-env` does in atropos: how much of the queue is whose."""
        own = self.environment(number)
        now, never = time.monotonic(), float("-inf")
        connected = [
            e for e in self._environments if now - self._heard.get(e.number, never) < CONNECTED_S
        ]
        total = sum(e.max_token_length * max(0.0, e.weight) for e in connected)
        shares = {e.number: e.min_batch_allocation or 0.0 for e in connected}
        queued, size = self._queue.queued(self._taken()), self.run.config.rollouts.group_size
        batch = self.run.config.rollouts.groups_per_round
        others = sum(
            max(0, count - int(batch * shares.get(environment, 0.0)))
            for environment, count in queued.items()
            if environment != number
        )
        return {
            "current_step": self.round or 0,
            "queue_size": queued[number] + others,
            "unallocated_fraction": 1.0 - min(sum(shares.values()), 1.0),
            "self_queue_size": queued[number],
            "max_group_size": size,
            "env_weight": max(WEIGHT_MIN, own.max_token_length * own.weight / (total or 1.0)),
        }

    def _taken(self) -> int:
        self._look()
        rounds = 0 if self._round is None else self._round + self._sealed
        return rounds * self.run.config.rollouts.groups_per_round

    def _look(self) -> None:
        """See which checkpoint is the latest, and whether its round is sealed."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        if self._round is None:
            latest = latest_checkpoint(self.run)
            if latest is None:
                return
            self._round = latest.number
        while read_manifest(self.run.store, checkpoint_slot(self._round + 1)) is not None:
            self._round += 1
        self._sealed = read_manifest(self.run.store, rollouts_slot(self._round)) is not None

    def _policy(self, version: int | None) -> ServedPolicy:
        """The policy of a committed checkpoint, by default of the latest. Raises InputError."""
        current = self.round
        if current is None:
            raise InputError("expected a group of a policy: the run has no checkpoint yet")
        version = current if version is None else version
        if version not in self._policies:
            committed = read_manifest(self.run.store, checkpoint_slot(version))
            if committed is None:
                raise InputError(
                    f"group_overrides.policy_version: expected a committed checkpoint, the latest "
                    f"is {current}, found {version}"
                )
            digest = str(committed[0].extra["parameters_digest"])
            self._policies[version] = ServedPolicy(
                endpoints=(),
                model=served_model_id(self.run.config.inference.model, version, digest),
                weight_version=version,
                parameters_digest=digest,
                tokenizer_digest=self._identity.tokenizer_digest,
                chat_template_digest=self._identity.chat_template_digest,
                checkpoint=ref_of(committed[0]),
            )
        return self._policies[version]

    def _commit(self, environment: PushingEnvironment, attempt: str) -> PushingEnvironment:
        """Create a registration; the one that is committed under its number."""
        record = canonical_json({"attempt": attempt, "environment": asdict(environment)})
        data = commit_object(
            self.run.store,
            environment_key(environment.number),
            record,
            attempt=attempt,
            fingerprint="",
            identify=lambda other: (parse_json(other)["attempt"], ""),
        )
        return _registered(data, self.run.store.url_of(environment_key(environment.number)))

    def _read_environments(self) -> None:
        """Read the registrations that are not known yet."""
        while True:
            key = environment_key(len(self._environments))
            try:
                data = self.run.store.read(key)
            except ObjectMissing:
                return
            self._environments.append(_registered(data, self.run.store.url_of(key)))


def _check_stored(
    data: ScoredData, policy: ServedPolicy, group_at: Callable[[str], RolloutGroup]
) -> None:
    """Make the group as it will be stored, before any is. Raises InputError."""
    try:
        # What reads it later has no integers over 64 bits.
        orjson.dumps([data.generation_params, data.group_overrides])
        with np.errstate(over="raise"):  # a logprob beyond float32
            encode_shard(
                [group_at("group")],
                run_id="",
                round=0,
                shard=0,
                attempt="",
                replica="",
                fingerprint="",
                policy=policy,
            )
    except (ValueError, TypeError, ArithmeticError, pa.ArrowException) as error:
        raise InputError(f"the group cannot be stored: {error}") from None


def _registered(data: bytes, source: str) -> PushingEnvironment:
    try:
        return PushingEnvironment(**parse_json(data)["environment"])
    except (ValueError, TypeError, KeyError) as error:
        raise CorruptObject(f"{source}: expected the registration of an environment") from error
