"""Proof that what decodes is what was trained: a canary, scored by the trainer's own forward pass.

`prove` asks every endpoint for some tokens, and the trainer's model computes the log-probabilities
of those very tokens, which agree but for rounding: stale or damaged weights, another tokenizer,
template or attention show at once, and end the round before anything is sampled for training.
`rehearse` does the same to weights that are not served yet, through a private engine of one slot.
"""

import asyncio
import dataclasses
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32
from transformers import PreTrainedTokenizerBase

from marin_rl.config import EngineConfig, InferenceConfig
from marin_rl.errors import BadResponse, InferenceError, InputError, MarinRLError, StalePolicy
from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.inference.client.fleet_sources import board_of
from marin_rl.inference.client.policy_client import PolicyClient, client_of
from marin_rl.inference.client.proofs import (
    CANARY,
    CANARY_PROMPT,
    CANARY_SEED,
    PROBE_TOKENS,
    CanarySize,
    mean_difference,
)
from marin_rl.inference.client.protocol import ChatRequest
from marin_rl.inference.engine import Engine
from marin_rl.inference.generation import GenerationRequest
from marin_rl.lora.adapter import Adapter, merged
from marin_rl.models.module import LanguageModel
from marin_rl.progress import phase
from marin_rl.rollouts.bridge import TemplateBridge
from marin_rl.serving.weights.checkpoint_loader import Loaded, read_checkpoint
from marin_rl.storage.fleet import ProvenVersion, run_sha256
from marin_rl.storage.runs import Run
from marin_rl.training.logprobs import compile_sequence_logprobs, rounded_up, sequence_logprobs
from marin_rl.training.model import named_parameters, with_parameters
from marin_rl.types import Canary, Sampling, ServedPolicy

SAMPLING = Sampling(temperature=1.0, max_tokens=CANARY.tokens, seed=CANARY_SEED)
REHEARSED_TOKENS = 8
DIGEST_DIGITS = 16
# Mean difference that rounding may make, in nats. Measured with SmolLM2-135M (30 layers), means
# over 32 and 64 tokens of three prompts and four seeds: at most 6e-6 in float32; in bfloat16 0.011
# to 0.038 next to a trainer in float32, and 0.022 to 0.055 next to one in bfloat16. Weights one
# update of AdamW apart (learning rate 1e-5) differ by 0.009 to 0.05 in float32; in bfloat16 they
# are seen from about 1e-4 on (0.07 to 0.2), and at 3e-4 always (0.27 and more).
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}


Connect = Callable[..., PolicyClient]


@dataclass(frozen=True, slots=True)
class Gap:
    """Difference of an engine from the trainer, whose log-probabilities are `trained`.

    `nats` is the mean difference of the log-probabilities, NaN if one is; `message` says where they
    are farthest apart.
    """

    nats: float
    trained: Float32[np.ndarray, " N"]
    message: str


def canary_ids(tokenizer: PreTrainedTokenizerBase) -> Int32[np.ndarray, " P"]:
    """The prompt of the rehearsal. Raises InputError for a tokenizer that encodes nothing."""
    ids = np.asarray(tokenizer.encode(CANARY_PROMPT[0].content), np.int32)
    if not len(ids):
        raise InputError("the tokenizer makes no ids of plain text")
    return ids


def tolerance_of(config: InferenceConfig, dtype: jnp.dtype | type) -> float:
    tolerance = config.canary_tolerance
    return TOLERANCES[jnp.dtype(dtype).name] if tolerance is None else tolerance


@dataclass(frozen=True, slots=True)
class Proof:
    """The largest mean difference of an endpoint, and the canary that proves later endpoints."""

    nats: float
    canary: Canary


@phase("proving that the engine decodes as trained")
def prove(
    policy: ServedPolicy,
    model: LanguageModel,
    config: InferenceConfig,
    before: Callable[[], Loaded | None] = lambda: None,
    *,
    dtype: jnp.dtype | type = jnp.float32,
    temperature: float = 1.0,
    connect: Connect = PolicyClient,
    size: CanarySize = CANARY,
) -> Proof:
    """Compare the canary of every endpoint with the log-probabilities of the trainer, in nats.

    `dtype` is what endpoints compute in, `temperature` what rollouts are sampled at, for theirs are
    to be log-probabilities at it; 0 is greedy, whose log-probabilities are those at 1. `connect`
    makes the client of an endpoint. Raises StalePolicy above `tolerance_of` the dtype, with the
    expected digest and the served one: that of the weights `before` (called only then) if they give
    the endpoint's numbers, else what the endpoint says of itself. Raises BadResponse for an
    endpoint that leaves temperature out of its numbers, and what the client raises.
    """
    gaps, tolerance = list[Gap](), tolerance_of(config, dtype)
    sampling = dataclasses.replace(SAMPLING, temperature=temperature or 1.0, max_tokens=size.tokens)
    answers = _sampled(policy, config, sampling, connect, size)
    for endpoint, answer in zip(policy.endpoints, answers, strict=True):
        gap = _gap(model, answer, sampling.temperature)
        if not gap.nats <= tolerance:  # NaN is none
            # first: right weights with numbers from before temperature are no stale policy
            if sampling.temperature != 1.0 and _gap(model, answer, 1.0).nats <= tolerance:
                raise BadResponse(
                    f"{endpoint} reports log-probabilities from before temperature: expected those "
                    f"at sampling.temperature ({sampling.temperature:g}), which tokens are drawn "
                    "at and the trainer scores at. Start vLLM with --logprobs-mode "
                    "processed_logprobs"
                )
            raise StalePolicy(
                f"{endpoint} does not sample from {policy.model}: expected parameters "
                f"{policy.parameters_digest[:DIGEST_DIGITS]}, "
                f"{_found(answer, gap, before(), sampling.temperature, tolerance)}{_remedy(policy)}"
            )
        gaps.append(gap)
    samples = [completion.token_ids for completion in answers[0].completions]
    canary = Canary(
        temperature=sampling.temperature,
        token_ids=tuple(np.concatenate(samples).tolist()),
        logprobs=tuple(gaps[0].trained.tolist()),
        tolerance=tolerance,
        lengths=tuple(map(len, samples)),
    )
    return Proof(max(gap.nats for gap in gaps), canary)


def prove_version(run: Run, policy: ServedPolicy, model: LanguageModel) -> ServedPolicy:
    """Prove that a run's endpoints sample with `model`, its policy as it is trained.

    The result has the canary by which clients prove endpoints of a fleet that come later. Raises as
    `prove` does.
    """
    config, bridge, size = run.config, TemplateBridge(run.config.policy), CANARY
    fleet = config.inference.has_fleet
    if config.in_flight_updates:
        # A server that is sent its weights may be of an earlier version of marin-rl.
        sent = bool(config.inference.endpoints) and not fleet
        room = config.policy.context_length - len(bridge.prompt(CANARY_PROMPT))
        # One sample, whose tokens have one order where new weights come between them.
        size = CanarySize(samples=1, tokens=min(PROBE_TOKENS, room), probe=not sent)

    def before() -> Loaded | None:
        with suppress(MarinRLError):  # only a more telling message is at stake
            version = policy.weight_version
            return read_checkpoint(run, version - 1) if version else None
        return None

    canary = prove(
        policy,
        model,
        config.inference,
        before,
        dtype=jnp.dtype(config.policy.compute_dtype),
        temperature=config.sampling.temperature,
        connect=client_of(config.inference, bridge),
        size=size,
    ).canary
    if not fleet:
        return policy
    if config.in_flight_updates:
        # Clients that sample by another version at the time prove this one by it.
        version, digest = policy.weight_version, policy.parameters_digest
        proven = ProvenVersion(version=version, parameters_digest=digest, canary=canary)
        board_of(config.inference, run.folder).prove(run_sha256(run.folder), proven)
    return dataclasses.replace(policy, canary=canary)


@phase("proving that the engine decodes as the model computes")
def rehearse(
    model: LanguageModel,
    prompt_ids: Int32[np.ndarray, " P"],
    config: InferenceConfig,
    dtype: jnp.dtype | type,
    adapter: Adapter | None = None,
    engine: Engine | None = None,
) -> float:
    """The mean |engine - trainer| of log-probabilities, in nats, of weights to be served.

    A private engine of one slot decodes a few tokens after the prompt, or `engine`, which has these
    weights. With an `adapter` it decodes on that, and the trainer scores the model merged with it.
    Raises InferenceError above `tolerance_of` the dtype, or where the logits are not finite, and
    InputError for a model that the engine cannot decode.
    """
    decoding = engine
    if decoding is None:
        room: dict[str, Any] = {}
        if adapter is not None:
            room = {"adapters_max": 1, "adapter_rank_max": adapter.rank_max}
        settings = EngineConfig(slots=1, chunk_steps=REHEARSED_TOKENS, prefill_rows=1, **room)
        length = rounded_up(len(prompt_ids) + REHEARSED_TOKENS)
        decoding = Engine(model, settings, context_length=length, dtype=dtype)
    sampling = dataclasses.replace(SAMPLING, max_tokens=REHEARSED_TOKENS)
    try:
        load, trained = 0, model
        if adapter is not None:
            named: dict[str, Any] = {"name": "canary", "weight_version": 0, "parameters_digest": ""}
            load = decoding.adapters.load(adapter, **named).number
            trained = with_parameters(model, merged(named_parameters(model), adapter))
        request = GenerationRequest(prompt_ids=prompt_ids, sampling=sampling, adapter=load)
        decoded = decoding.submit(request)
        # The trainer's program is compiled while the engine's are.
        any_ids = np.zeros(REHEARSED_TOKENS, np.int32)
        compile_sequence_logprobs(trained, prompt_ids, any_ids, sampling.temperature)
        (sample,) = decoded.result(timeout=config.request_timeout_s).samples
    except TimeoutError:
        raise InferenceError(
            f"the canary was not decoded within {config.request_timeout_s:g} s"
        ) from None
    finally:
        # also after a time-out, or its thread and its memory would stay
        if engine is None:
            decoding.close()
    expected = sequence_logprobs(trained, prompt_ids, [sample.token_ids], sampling.temperature)
    gap = _gap_of(sample.token_ids, expected, sample.logprobs)
    tolerance = tolerance_of(config, dtype)
    if not gap.nats <= tolerance:
        kind = jnp.dtype(dtype)
        rounding = "" if kind == jnp.float32 else "; leave room for its rounding, or serve float32"
        raise InferenceError(
            f"the engine does not compute what the trainer computes with these weights: "
            f"{gap.message} by the engine in {kind.name}, above inference.canary_tolerance "
            f"({tolerance:g}){rounding}"
        )
    return gap.nats


def _sampled(
    policy: ServedPolicy,
    config: InferenceConfig,
    sampling: Sampling,
    connect: Connect,
    size: CanarySize,
) -> list[ChatAnswer]:
    request = ChatRequest(
        model=policy.model,
        messages=CANARY_PROMPT,
        n=size.samples,
        sampling=sampling,
        probe=size.probe,
    )

    async def ask(endpoint: str) -> ChatAnswer:
        async with connect(
            endpoints=(endpoint,),
            model=policy.model,
            api_key=os.environ.get(config.api_key_variable),
            timeout_s=config.request_timeout_s,
            attempts_max=config.request_attempts_max,
            in_flight_max=1,
        ) as client:
            return await client.answer(request)

    async def ask_all() -> list[ChatAnswer]:
        return await asyncio.gather(*map(ask, policy.endpoints))

    try:
        return asyncio.run(ask_all())
    except StalePolicy as error:
        expected = policy.parameters_digest[:DIGEST_DIGITS]
        raise StalePolicy(f"expected parameters {expected}: {error}. {_remedy(policy)}") from None


def _found(
    answer: ChatAnswer, gap: Gap, before: Loaded | None, temperature: float, tolerance: float
) -> str:
    """The parameters that an endpoint serves instead, in words, and the gap."""
    apart = f"{gap.message}, above inference.canary_tolerance ({tolerance:g}). "
    if before is not None and _gap(before.model, answer, temperature).nats <= tolerance:
        digest = before.parameters_digest[:DIGEST_DIGITS]
        return f"found those of round {before.round}, {digest}; {apart}"
    if gap.nats <= TOLERANCES["bfloat16"]:
        apart += (
            "TF32 or bfloat16 makes differences of this size as well: have the endpoint multiply "
            "in float32, or set inference.canary_tolerance. "
        )
    if claimed := (answer.parameters_digest or "")[:DIGEST_DIGITS]:
        return f"which it claims to serve ({claimed}), but found others; {apart}"
    return f"found others; the endpoint does not say which; {apart}"


def _remedy(policy: ServedPolicy) -> str:
    return (
        f"Nothing was sampled for training: load {policy.checkpoint.slot} at the endpoint "
        "(inference.publish, or POST /admin/update_weights_from_disk) and run again"
    )


def _gap(model: LanguageModel, answer: ChatAnswer, temperature: float) -> Gap:
    samples = [completion.token_ids for completion in answer.completions]
    if not all(map(len, samples)):
        raise BadResponse("expected tokens in answer to the canary, found none: nothing is proven")
    ours = sequence_logprobs(model, answer.prompt_token_ids, samples, temperature)
    measured = np.concatenate([completion.logprobs for completion in answer.completions])
    return _gap_of(np.concatenate(samples), ours, measured)


def _gap_of(
    token_ids: Int32[np.ndarray, " N"],
    expected: Float32[np.ndarray, " N"],
    measured: Float32[np.ndarray, " N"],
) -> Gap:
    place = int(np.abs(measured - expected).argmax())  # argmax finds NaN first
    nats = mean_difference(expected, measured)
    message = (
        f"expected a log-probability of {expected[place]:.6f} for token {token_ids[place]} of the "
        f"canary, found {measured[place]:.6f}; {nats:.6f} nats apart on average of its "
        f"{len(expected)} tokens"
    )
    return Gap(nats=nats, trained=expected, message=message)
