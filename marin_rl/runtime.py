"""Runtime of a run in this process: tokenizer, trainer, reward model, server, kept between tasks.

Tasks ask for what they need by run; it is made on first use and kept, so a round compiles nothing,
reads no checkpoint it just wrote, and hands weights to the engine as references. Nothing here is
needed for correctness: a new process reads all of it from the committed slots.
"""

import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from marin_rl.errors import ConfigError, MarinRLError, StorageError
from marin_rl.machine import give_back_freed_memory
from marin_rl.storage.runs import Run, round_of
from marin_rl.tokenizers import tokenizer_for
from marin_rl.types import Canary, ServedPolicy, SlotRef

# JAX and Levanter take seconds to import, and commands that only read a run need neither.
if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from marin_rl.config import InferenceConfig
    from marin_rl.inference.endpoints import Published
    from marin_rl.lora import Adapter
    from marin_rl.rollouts.rewards import RewardScorer
    from marin_rl.serving.server import PolicyServer
    from marin_rl.serving.weights.canary import Suspect
    from marin_rl.training.loop import Trainer
    from marin_rl.training.model import LmHeadModel
    from marin_rl.training.reward_model import RewardModelTraining
    from marin_rl.training.sft import WarmStart
    from marin_rl.training.state import Identity


@dataclass(frozen=True, slots=True)
class Weights:
    """The model of a checkpoint, to be served, and its identity.

    `trained` is the model as it is trained, which may be an adapter next to a base; endpoints are
    proven by it. With `adapter`, `model` is the base that it is served next to.
    """

    model: "LmHeadModel"
    trained: "LmHeadModel"
    identity: "Identity"
    adapter: "Adapter | None" = None

    @property
    def bytes(self) -> int:
        """Bytes of what a server is given: of all parameters, or of an adapter alone."""
        from marin_rl.training.model import named_parameters

        arrays = named_parameters(self.model) if self.adapter is None else self.adapter.arrays
        return sum(array.nbytes for array in arrays.values())


class RunRuntime:
    """Tokenizer, trainer, reward model and server of one run, each made on first use.

    Methods may be called from any thread. What trains runs one at a time, and so does what serves;
    both at once only where rounds are sampled ahead of training.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.RLock()
        self._serving = threading.RLock()
        self._server: PolicyServer | None = None
        self._transfers_failed = 0
        self._published = False
        self._session = secrets.token_hex(16)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The run's tokenizer. Raises InputError."""
        return tokenizer_for(self._run.config.policy)

    @cached_property
    def trainer(self) -> "Trainer":
        """The run's trainer, before any checkpoint is loaded. Raises InputError, ConfigError."""
        from marin_rl.compilation import prepare_for_training
        from marin_rl.training.loop import Trainer

        prepare_for_training()
        return Trainer(self._run, self.tokenizer)

    @cached_property
    def _warm_start(self) -> "WarmStart":
        from marin_rl.compilation import prepare_for_training
        from marin_rl.training.sft import WarmStart

        prepare_for_training()
        return WarmStart(self._run, self.tokenizer)

    @cached_property
    def _reward_model(self) -> "RewardModelTraining":
        from marin_rl.compilation import prepare_for_training
        from marin_rl.training.reward_model import RewardModelTraining

        prepare_for_training()
        return RewardModelTraining(self._run, self.tokenizer)

    @cached_property
    def _reward_scorer(self) -> "RewardScorer":
        from marin_rl.compilation import enable_compilation_cache
        from marin_rl.rollouts.rewards import reward_model_slot_of
        from marin_rl.tokenizers import TokenizerIdentity
        from marin_rl.training.preference import LearnedReward

        enable_compilation_cache()
        names = TokenizerIdentity.of(self.tokenizer)
        slot = reward_model_slot_of(
            self._run.config, names.tokenizer_digest, names.chat_template_digest
        )
        return LearnedReward(slot, self.tokenizer)

    def reward_scorer(self) -> "RewardScorer | None":
        """The reward model that the run's environment names, read once; None where it names none.

        Raises ConfigError and InputError as `reward_model_slot_of` does, CorruptObject.
        """
        if self._run.config.environment.reward_model is None:
            return None
        with self._serving:
            return self._reward_scorer

    def prepare_pairs(self) -> SlotRef:
        """Commit the pairs of the run's reward model: see `RewardModelTraining.prepare`."""
        with self._lock:
            self.__dict__.pop("_warm_start", None)  # its state and programs are not needed again
            return self._reward_model.prepare()

    def run_reward_segment(self, step_from: int, pairs: SlotRef) -> SlotRef:
        """Train the segment of the reward model that begins at `step_from`."""
        with self._lock:
            return self._reward_model.run_segment(step_from, pairs)

    def run_sft_segment(self, step_from: int) -> SlotRef:
        """Play the segment of the warm start that begins at `step_from`: see `WarmStart`."""
        with self._lock:
            return self._warm_start.run_segment(step_from)

    def init_policy(self) -> SlotRef:
        """Commit checkpoint 0 of the run: see `Trainer.init_policy`."""
        with self._lock:
            self.__dict__.pop("_warm_start", None)  # its state and programs are not needed again
            return self.trainer.init_policy()

    def train_round(self, round: int, batches: SlotRef, checkpoint: SlotRef) -> SlotRef:
        """Train one round and commit its checkpoint: see `Trainer.train_round`."""
        with self._lock:
            if self._server is not None and not self._run.config.max_staleness:
                self._server.engine.sleep()  # its caches' memory is the trainer's meanwhile
            trained = self.trainer.train_round(round, batches, checkpoint)
            # Without this the heap grows from round to round, by 15 MB for a small model, since
            # live arrays fragment what the step freed. The next step's page faults cost less.
            give_back_freed_memory()
            return trained

    def serve(self, checkpoint: SlotRef) -> ServedPolicy:
        """Serve a committed checkpoint, verify that it is served, and return the policy.

        The embedded server starts on first use and then takes the trainer's own arrays, whose
        digest the checkpoint's manifest carries; remote endpoints receive a copy, or must have it
        already. Raises StalePolicy where a canary contradicts the trainer's model, BadResponse
        where it leaves temperature out, InputError for a model the engine cannot decode,
        CorruptObject for a damaged checkpoint, and what the client raises.
        """
        with self._serving:
            try:
                policy = self._serve_proven(self._weights_of(checkpoint), checkpoint)
            except MarinRLError:
                self._transfers_failed += 1
                raise
            self._transfers_failed = 0
            return policy

    def _weights_of(self, checkpoint: SlotRef) -> "Weights":
        """The trainer's own arrays, or those in files where it is busy or beyond the checkpoint."""
        from marin_rl.serving.weights.checkpoint_loader import read_slot
        from marin_rl.training.state import identity_of

        ahead = bool(self._run.config.max_staleness)
        if self._lock.acquire(blocking=not ahead):
            try:
                if not ahead or self.trainer.checkpoint in (None, checkpoint):
                    self.trainer.load(checkpoint)
                    identity = self.trainer.identity
                    assert identity is not None, "a checkpoint is loaded"
                    trainer = self.trainer
                    if self._apart:
                        base, adapter = trainer.served_apart
                        return Weights(base, trainer.model, identity, adapter)
                    return Weights(trainer.served_model, trainer.model, identity)
            finally:
                self._lock.release()
        merged = read_slot(self._run, checkpoint).model
        identity = identity_of(self._run, checkpoint)
        if self._apart:
            from marin_rl.serving.weights.adapter_versions import read_base_of, version_of

            version = version_of(self._run, checkpoint)
            base = read_base_of(self._run, version).model
            return Weights(base, merged, identity, version.adapter)
        return Weights(merged, merged, identity)

    @property
    def _apart(self) -> bool:
        """True where servers are given the adapter alone, and have the base."""
        inference = self._run.config.inference
        if self._run.config.policy.lora is None:
            return False
        if inference.endpoints and not inference.pulled:
            return inference.publish == "lora_adapter"
        return inference.serve_merged is False

    def _serve_proven(self, weights: "Weights", checkpoint: SlotRef) -> ServedPolicy:
        import jax.numpy as jnp

        from marin_rl.inference.canary_prompt import CANARY, CANARY_PROMPT, CanarySize
        from marin_rl.inference.client.routes import client_of
        from marin_rl.rollouts.bridge import TemplateBridge
        from marin_rl.serving.weights.canary import prove

        identity = weights.identity
        version = round_of(checkpoint.slot.rpartition("/")[2]) or 0
        began = time.monotonic()
        published = self._load_weights(version, weights)
        policy = ServedPolicy(
            endpoints=published.endpoints,
            model=published.model,
            weight_version=version,
            parameters_digest=identity.parameters_digest,
            tokenizer_digest=identity.tokenizer_digest,
            chat_template_digest=identity.chat_template_digest,
            checkpoint=checkpoint,
            transfer=self._transfer(time.monotonic() - began, weights.bytes, published.endpoints),
            weights=published.weights,
        )
        config, bridge = self._run.config, TemplateBridge(self._run.config.policy)
        size = CANARY
        if config.in_flight_updates:
            # A server that is sent its weights may be of an earlier version of marin-rl.
            sent = bool(config.inference.endpoints) and not config.inference.has_fleet
            room = config.policy.context_length - len(bridge.prompt(CANARY_PROMPT))
            size = CanarySize.in_flight(room, probe=not sent)
        proof = prove(
            policy,
            weights.trained,
            config.inference,
            lambda: self._suspects(version),
            dtype=jnp.dtype(config.policy.compute_dtype),
            temperature=config.sampling.temperature,
            connect=client_of(config.inference, bridge),
            size=size,
        )
        if not config.inference.has_fleet:
            return policy
        if config.in_flight_updates:
            self._leave_canary(policy, proof.canary)
        return replace(policy, canary=proof.canary)

    def _leave_canary(self, policy: ServedPolicy, canary: Canary) -> None:
        """Record the canary by which clients prove this version while others are sampled by."""
        from marin_rl.inference.client.fleet_sources import board_of
        from marin_rl.storage.fleet import ProvenVersion, run_sha256

        proven = ProvenVersion(
            version=policy.weight_version,
            parameters_digest=policy.parameters_digest,
            canary=canary,
        )
        board = board_of(self._run.config.inference, self._run.folder)
        board.prove(run_sha256(self._run.folder), proven)

    def _transfer(self, seconds: float, size: int, endpoints: Sequence[str]) -> dict[str, float]:
        """Cost of the weight transfer. Endpoints that must have the weights already get none."""
        inference = self._run.config.inference
        remote = len(endpoints) if inference.publish != "none" else 0
        servers = remote if inference.endpoints else 1
        return {
            "bytes": float(servers * size),
            "seconds": seconds,
            "transfers": float(servers),
            "failures": float(self._transfers_failed),
        }

    def _suspects(self, version: int) -> "Iterator[Suspect]":
        """Yield what an endpoint may serve by mistake: the checkpoint of the round before."""
        from marin_rl.serving.weights.canary import Suspect
        from marin_rl.serving.weights.checkpoint_loader import read_checkpoint

        if version == 0:
            return
        with suppress(MarinRLError):  # only a more telling message is at stake
            loaded = read_checkpoint(self._run, version - 1)
            yield Suspect(
                name=f"round {version - 1}",
                parameters_digest=loaded.parameters_digest,
                model=loaded.model,
            )

    def _load_weights(self, version: int, weights: "Weights") -> "Published":
        """Load a model where it is served."""
        from marin_rl.inference.endpoints import Published, publish
        from marin_rl.serving.weights.adapter_folders import export_peft
        from marin_rl.training.model import digest_of, named_parameters, save_hf
        from marin_rl.training.quantized_layers import merged_model

        identity = weights.identity
        if not self._run.config.inference.endpoints:
            server = self._served_here(version, weights)
            return Published(endpoints=(server.base_url,), model=server.model_id)
        names = identity.tokenizer_digest, identity.chat_template_digest

        as_adapter = self._run.config.inference.publish == "lora_adapter"
        if as_adapter and self._run.config.policy.lora is None:
            raise ConfigError(
                "inference.publish lora_adapter is for runs that train an adapter, and this one "
                "trains all parameters: set inference.publish to update_weights_from_disk"
            )

        def save(folder: Path) -> None:
            if as_adapter:
                export_peft(self._run, version, folder)
            else:
                save_hf(merged_model(weights.model), self.tokenizer, folder)

        saved = None
        sent = self._run.config.inference.publish == "update_weights_from_disk"
        if self._run.config.policy.lora is not None and sent:
            # a policy with an adapter has the identity of both, but is sent merged
            saved = digest_of(named_parameters(merged_model(weights.model)))
        self._published = True
        digest = identity.parameters_digest
        return publish(self._run, version, digest, names, save, saved, session=self._session)

    def _served_here(self, version: int, weights: "Weights") -> "PolicyServer":
        """The running server, with this policy in it."""
        from marin_rl.serving.weights.adapter_versions import serve_version, with_adapters_room

        config, identity, adapter = self._run.config, weights.identity, weights.adapter
        if adapter is None:
            digest = identity.parameters_digest
            return self._swapped_server(config.inference, weights.model, version, digest)
        if self._server is not None and not self._server.engine.alive:
            self.close()
        server = self._server
        if server is None:
            assert identity.base_digest is not None, "an adapter is that of a base"
            roomy = with_adapters_room(config, adapter.rank_max).inference
            server = self._swapped_server(roomy, weights.model, 0, identity.base_digest)
        digest = identity.parameters_digest
        serve_version(server.adapters, config.inference.model, version, digest, adapter)
        return server

    def _swapped_server(
        self, inference: "InferenceConfig", model: "LmHeadModel", version: int, digest: str
    ) -> "PolicyServer":
        """The running server, with this model in it."""
        import jax.numpy as jnp

        from marin_rl.compilation import spare_long_lived_objects
        from marin_rl.serving.server import PolicyServer
        from marin_rl.serving.weights.checkpoint_loader import with_update_root

        if self._server is not None and not self._server.engine.alive:
            self.close()  # an engine that ended by itself answers no request any more
        if self._server is not None:
            again = self._run.config.recompute_kv_cache
            self._server.swap(model, version, digest, recompute_kv_cache=again)
            return self._server
        policy = self._run.config.policy
        server = PolicyServer(
            model,
            self.tokenizer,
            with_update_root(inference, self._run.config.root),
            context_length=policy.context_length,
            weight_version=version,
            parameters_digest=digest,
            dtype=jnp.dtype(policy.compute_dtype),
        )
        server.start(inference.host or "127.0.0.1", inference.port or 0)
        self._server = server
        spare_long_lived_objects()
        return server

    def close(self) -> None:
        """Stop the server, if there is one; the rest is left to the garbage collector."""
        with self._serving:
            if self._server is not None:
                self._server.stop()
                self._server = None
            if self._published:
                from marin_rl.inference.endpoints import unpublish

                self._published = False
                with suppress(StorageError):  # servers find by themselves that it is out of date
                    unpublish(self._run)


_runtimes: dict[tuple[str, str], RunRuntime] = {}
_runtimes_lock = threading.Lock()


def runtime_for(run: Run) -> RunRuntime:
    """Return this process's runtime of `run`; the same object for the same root and run id."""
    key = (run.store.url, run.run_id)
    with _runtimes_lock:
        if key not in _runtimes:
            _runtimes[key] = RunRuntime(run)
        return _runtimes[key]


def release(run: Run) -> None:
    """Stop and drop this process's runtime of `run`."""
    with _runtimes_lock:
        kept = _runtimes.pop((run.store.url, run.run_id), None)
    if kept is not None:
        kept.close()
