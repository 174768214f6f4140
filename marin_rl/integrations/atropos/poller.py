"""Trainer's side of an API server of atropos: batches that it hands out become groups of a run.

Such a server keeps its queue in memory and forgets a batch as it hands it out, so each batch is one
committed object before anything else is done with it; then its groups are committed as if their
environments had pushed them here. A process that is killed in between finds the batch again. Leaves
out what is done with a group (`receiver`).
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
from pydantic import TypeAdapter, ValidationError

from marin_rl.environments.http_answers import UnfitAnswer, ask_once
from marin_rl.errors import EndpointUnavailable, InputError
from marin_rl.integrations.atropos.receiver import Receiver
from marin_rl.integrations.atropos.scored_data import PushingEnvironment, ScoredData
from marin_rl.storage.commits import commit_object, new_attempt
from marin_rl.storage.layout import PUSHING, popped_batch_key, popped_batch_of
from schemas.strict_json import parse_json

TIMEOUT_S = 60.0
IDLE_S = 0.5  # between two requests while no batch is ready
PATIENCE_S = 300.0  # for a server that is away, or cannot be reached

_GROUP = TypeAdapter(ScoredData)


class Poller:
    """Takes batches from one server for as long as the run has rounds."""

    def __init__(self, receiver: Receiver, url: str, complain: Callable[[str], None]) -> None:
        self._receiver, self._url, self._complain = receiver, url.rstrip("/"), complain
        self._next = 0
        self._unknown = False  # the server knows of no trainer, though one has registered
        self.batches = 0

    def recover(self) -> None:
        """Take in the last batch again; groups that are committed already count as repeated."""
        self._next = self._unused()
        if self._next:
            last = self._receiver.run.store.read(popped_batch_key(self._next - 1))
            self._take(parse_json(last)["batch"])

    def _unused(self) -> int:
        # batches before the last may have been collected as garbage
        keys = self._receiver.run.store.list(PUSHING)
        return 1 + max((n for key in keys if (n := popped_batch_of(key)) is not None), default=-1)

    def register(self) -> None:
        """Register as the trainer. Raises InputError for what is no server of atropos."""
        config = self._receiver.run.config
        answer = self._ask(
            "POST",
            "/register",
            {
                "wandb_group": config.run_id,
                "wandb_project": config.trackers.wandb_project or "marin-rl",
                "batch_size": config.rollouts.groups_per_round * config.rollouts.group_size,
                "max_token_len": config.policy.context_length + 1,
                "checkpoint_dir": "",
                "save_checkpoint_interval": -1,
                "starting_step": self._receiver.round or 0,
                "num_steps": config.rounds,
            },
        )
        if "uuid" not in answer:
            raise InputError(
                f"{self._url}/register answers {answer!r:.100}: expected the API server of "
                "atropos 0.4 (`run-api`)"
            )

    def poll(self) -> bool:
        """Take a batch, if there is one and the run has use for it; True if there was.

        Raises InputError, StorageError, EndpointUnavailable after `PATIENCE_S` without an answer.
        """
        config = self._receiver.run.config
        rounds = 1 + config.batching.staleness_rounds_max  # this one, and as old as groups may be
        if self._receiver.queue_size >= config.rollouts.groups_per_round * rounds:
            return False
        answer = self._ask("GET", "/batch")
        if answer.get("status") == "error":  # it was started again, and knows of no trainer
            if self._unknown:
                # Environments pushed to it after its start and before a registration: it takes
                # registrations and follows none, until it is reset.
                self._complain(
                    f"{self._url} was started again, and environments pushed to it before a "
                    "trainer was registered, after which it hands out nothing: it is reset, and "
                    "those groups are lost"
                )
                with suppress(httpx.HTTPError, UnfitAnswer):  # it is asked for a batch next
                    ask_once("GET", f"{self._url}/reset_data", timeout_s=TIMEOUT_S)
            self.register()
            self._unknown = True
            return False
        self._unknown = False
        batch = answer.get("batch")
        if not batch:
            return False
        if not isinstance(batch, list):
            raise InputError(f"{self._url}/batch: expected a list of groups, found {batch!r:.80}")
        self._commit(batch)
        self._take(batch)
        self.batches += 1
        return True

    @property
    def finished(self) -> bool:
        return (self._receiver.round or 0) >= self._receiver.run.config.rounds

    def _commit(self, batch: Any) -> None:
        """Commit a batch under the next number. Raises StorageError."""
        store, attempt = self._receiver.run.store, new_attempt()
        data = json.dumps({"attempt": attempt, "url": self._url, "batch": batch}).encode()
        self._next = max(self._next, self._unused())
        while True:
            committed = commit_object(
                store,
                popped_batch_key(self._next),
                data,
                attempt=attempt,
                fingerprint="",
                identify=lambda other: (parse_json(other)["attempt"], ""),
            )
            self._next += 1
            if committed == data:
                return

    def _take(self, batch: Any) -> None:
        """Commit the groups of a batch; count and report refused ones."""
        for place, record in enumerate(batch):
            try:
                data = _GROUP.validate_python(record)
                environment = self._environment(data.env_id)
                moved = data.model_copy(update={"env_id": environment.number})
                self._receiver.accept([moved])
            except (InputError, ValidationError) as error:
                if isinstance(error, ValidationError):
                    self._receiver.counts["refused"] += 1
                self._complain(f"group {place} of batch {self._next - 1} is refused: {error}")

    def _environment(self, number: int | None) -> PushingEnvironment:
        name = "polled" if number is None else f"polled-{number}"
        known = self._receiver.named(name)
        if known is not None:
            return known
        config = self._receiver.run.config
        wanted = {"name": name, "group_size": config.rollouts.group_size, "weight": 1.0}
        return self._receiver.register({**wanted, "max_token_length": config.policy.context_length})

    def _ask(self, method: str, route: str, body: Any = None) -> dict[str, Any]:
        """The object that the server answers with; it is asked again while it is away.

        Raises EndpointUnavailable after `PATIENCE_S`, InputError for an answer of another server.
        """
        deadline, waited = time.monotonic() + PATIENCE_S, False
        while True:
            try:
                return self._asked(method, route, body)
            except (httpx.HTTPError, UnfitAnswer) as error:  # a proxy speaks while it is away
                failure = f"{type(error).__name__}: {error}"
            if time.monotonic() > deadline:
                raise EndpointUnavailable(f"{self._url}: no answer for {PATIENCE_S:g} s: {failure}")
            if not waited:
                self._complain(f"{self._url} does not answer, and is asked again: {failure}")
                waited = True
            time.sleep(IDLE_S)

    def _asked(self, method: str, route: str, body: Any) -> dict[str, Any]:
        """The object of one answer. Raises what may pass as httpx does, else InputError."""
        url, expected = f"{self._url}{route}", "expected the API server of atropos 0.4 (`run-api`)"
        bytes_max = self._receiver.run.config.inference.server.bodies_bytes_max
        try:
            answer = ask_once(method, url, timeout_s=TIMEOUT_S, bytes_max=bytes_max, json=body)
        except UnfitAnswer as error:
            raise InputError(f"{url} {error}; {expected}") from None
        if 400 <= answer.status < 500:
            raise InputError(f"{url} answers {answer.words}; {expected}")
        if not answer.ok:
            raise httpx.RemoteProtocolError(f"answers {answer.words}")
        return answer.object()


def poll_trajectories(
    receiver: Receiver, url: str, ready: Callable[[], None], complain: Callable[[str], None]
) -> int:
    """Take batches until the run is finished; the number of batches.

    Waits for the run's first checkpoint before it registers. Raises as `Poller` does.
    """
    poller = Poller(receiver, url, complain)
    poller.recover()
    while receiver.round is None:
        time.sleep(IDLE_S)
    poller.register()
    ready()
    while not poller.finished:
        if not poller.poll():
            time.sleep(IDLE_S)
    return poller.batches
