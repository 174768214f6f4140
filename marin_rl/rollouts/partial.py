"""Completions sampled in pieces that are kept and resumed later (`asynchrony.partial_tokens`).

A completion is asked for a piece of tokens at a time, from the exact ids of its prompt and of the
pieces so far. A token's random number follows from the seed and its position, so the pieces are
those of a single request. After each piece the unfinished completions of a group are committed
(`storage.tables.group_log`). There they may be interrupted, and another process, or the next
policy, resumes them. Pieces end at multiples of their length in every process: a run that was
killed makes the requests of an undisturbed one. A stop string may begin in one piece and end in
the next, where no endpoint sees it whole: it is looked for here, and what was sampled after it is
left out. Leaves out scores and finished groups (`sampler`).
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
from jaxtyping import Int32

from marin_rl.config import Config
from marin_rl.errors import BadResponse, InputError, NoSuchRoute, RequestRejected
from marin_rl.inference.client.answers import ChatAnswer, Completion, ServerTimings
from marin_rl.inference.client.protocol import ChatClient, ChatRequest
from marin_rl.inference.stops import StopStringScanner, text_before_stop
from marin_rl.rollouts.assemble import RolloutMaker, SampledPart, total_seconds
from marin_rl.rollouts.partial_members import GOES_ON, GroupRecord, Member, records_of
from marin_rl.rollouts.trajectories import (
    LENGTH,
    Diverged,
    GroupRequest,
    Interrupted,
    Interruption,
    all_of,
    check_identity,
    check_prompt,
)
from marin_rl.storage.tables.group_log import GroupLog
from marin_rl.tokenizers import PolicyTokenizer
from marin_rl.types import Message, Sampling, ServedPolicy

STOP = "stop"  # finish reason of a completion that an end token or a stop string ended
# Of an endpoint that cannot continue from token ids.
REFUSALS = (NoSuchRoute, RequestRejected, BadResponse)

# The latest policy whose endpoints were seen to continue from ids: asked once, until one refuses.
_proven: list[ServedPolicy] = []

Decode = Callable[[Sequence[int], str], str]  # text of a completion, by its ids and finish reason


def in_pieces(
    config: Config,
    client: AbstractAsyncContextManager[ChatClient],
    log: GroupLog,
    requests: Sequence[GroupRequest],
    interruption: Interruption | None = None,
    *,
    oldest: int = 0,
) -> AbstractAsyncContextManager[ChatClient]:
    """A client of the policy of `log` that samples groups in pieces, as a run is configured."""
    assert config.piece_tokens is not None, "the run samples whole completions"
    tokenizer = PolicyTokenizer(config.policy)

    def decode(ids: Sequence[int], finish_reason: str) -> str:
        """Decode as the run's server does, without the end token."""
        ended = finish_reason == STOP and bool(ids) and ids[-1] in tokenizer.end_ids
        return tokenizer.decoded(ids[:-1] if ended else ids)

    return piecewise(
        client,
        requests,
        log=log,
        tokens=config.piece_tokens,
        decode=decode,
        interruption=interruption or Interruption(),
        oldest=oldest,
        proves=bool(config.inference.endpoints),
    )


@asynccontextmanager
async def piecewise(
    endpoints: AbstractAsyncContextManager[ChatClient],
    requests: Sequence[GroupRequest],
    *,
    log: GroupLog,
    tokens: int,
    decode: Decode,
    interruption: Interruption,
    oldest: int = 0,
    proves: bool = False,
) -> "AsyncIterator[PiecewiseClient]":
    """Yield a client that samples `tokens` tokens at a time, and resumes the groups in `log`.

    Members with tokens of policies before `oldest` are too old for any further round and sampled
    again. With `proves`, endpoints are asked first whether they continue from ids: raises
    InputError for one that does not.
    """
    async with endpoints as client:
        if proves and requests and log.policy not in _proven:
            await _prove_continuation(client, log.policy, requests[0])
            _proven[:] = [log.policy]
        chains = await asyncio.to_thread(log.read, [r.group_id for r in requests])
        records = records_of(chains, requests, oldest)
        yield PiecewiseClient(client, log, records, tokens, decode, interruption)


@dataclass
class PiecewiseClient(ChatClient):
    """Client of a policy that asks for completions in pieces, and commits unfinished ones.

    A piece has `tokens` tokens. It answers recorded turns of dialogues from `records`, by groups:
    the state of an environment is not stored, an episode is begun again and given these turns.
    """

    client: ChatClient
    log: GroupLog
    records: Mapping[str, GroupRecord]
    tokens: int
    decode: Decode
    interruption: Interruption

    def __post_init__(self) -> None:
        self.model = self.log.policy.model

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Complete the samples from their committed tokens on. Raises Interrupted, Diverged."""
        sampling = request.sampling
        assert sampling.seed is not None, "members are known by their seeds"
        record, timings = self.records[request.session], list[ServerTimings]()
        members = [record.at(sampling.seed + i) for i in range(request.n)]
        members = [self._agreed(record, request, member) for member in members]
        if members[0].turn:  # the turn before is followed by this one, and worth its record
            await self._commit(record)
        while asked := [each for each in members if each.is_unfinished(sampling.max_tokens)]:
            if self.interruption.requested:
                await self._commit(record)
                raise Interrupted
            parts = await self._sampled(record, request, asked, timings)
            for member, part in zip(asked, parts, strict=True):
                member.add(part)
                record.begun_again.pop(member.index, None)
            record.pending += parts
            if any(member.is_unfinished(sampling.max_tokens) for member in asked):
                await self._commit(record)
        return ChatAnswer(
            model=self.model,
            prompt_token_ids=members[0].prompt,
            completions=tuple(self._completion(member, sampling.stop) for member in members),
            # Of all pieces that this process sampled; None where an endpoint says none.
            timings=ServerTimings(
                queue_s=total_seconds([each.queue_s for each in timings]),
                prefill_s=total_seconds([each.prefill_s for each in timings]),
                decode_s=total_seconds([each.decode_s for each in timings]),
            ),
        )

    def _agreed(self, record: GroupRecord, request: ChatRequest, member: Member) -> Member:
        """The recorded member, if its turn has this prompt; a new one is given the prompt.

        Raises Diverged. At its first turn a member begins again by itself.
        """
        new = record.new_messages(member, request.messages)
        if not len(member.prompt):
            member.messages = new
            return member
        same = request.prompt_ids is None or np.array_equal(member.prompt, request.prompt_ids)
        if same and member.messages == new:
            return member
        reason = (
            f"the environment's messages before turn {member.turn + 1} are others than recorded"
        )
        if member.turn:
            raise Diverged(reason)
        record.begin_again(member.index, reason)
        record.messages[member.index] = len(request.messages)
        fresh = record.at(member.seed)
        fresh.messages = new
        return fresh

    async def _sampled(
        self,
        record: GroupRecord,
        request: ChatRequest,
        asked: Sequence[Member],
        timings: list[ServerTimings],
    ) -> list[SampledPart]:
        """The next piece of each member; the first pieces of several members are one request."""
        if len(asked) > 1 and not any(len(member.tokens) for member in asked):
            first = replace(request.sampling, max_tokens=self._piece(asked[0], request.sampling))
            answers = [await self._ask(request, len(asked), first)]
        else:
            answers = await all_of([self._next(request, member) for member in asked])
        for answer in answers:
            check_identity(answer, self.log.policy)
        timings.append(answers[0].timings)
        pairs = [(answer, each) for answer in answers for each in answer.completions]
        return [
            self._part(
                record, member, answer, self._until_stop(member, completion, request.sampling.stop)
            )
            for member, (answer, completion) in zip(asked, pairs, strict=True)
        ]

    async def _next(self, request: ChatRequest, member: Member) -> ChatAnswer:
        """The next piece of one member."""
        own = replace(
            request.sampling, seed=member.seed, max_tokens=self._piece(member, request.sampling)
        )
        if not len(member.tokens) and request.prompt_ids is None:
            return await self._ask(request, 1, own)
        ids = member.ids if len(member.tokens) else request.prompt_ids
        assert ids is not None, "see above"
        try:
            answer = await self._ask(request, 1, own, ids)
        except REFUSALS:
            _proven.clear()  # another server may have taken its place
            raise
        check_prompt(answer, ids)
        return answer

    async def _ask(
        self,
        request: ChatRequest,
        n: int,
        sampling: Sampling,
        ids: Int32[np.ndarray, " P"] | None = None,
    ) -> ChatAnswer:
        """Samples of a turn, from exact ids or from its messages. Raises as `chat` does."""
        model = self.client.model  # its id of the policy may have no version
        return await self.client.answer(
            replace(request, model=model, n=n, sampling=sampling, prompt_ids=ids)
        )

    def _piece(self, member: Member, sampling: Sampling) -> int:
        sampled, piece = len(member.tokens), self.tokens
        return min(piece - sampled % piece, sampling.max_tokens - sampled)

    def _until_stop(
        self, member: Member, completion: Completion, stop: Sequence[str]
    ) -> Completion:
        """A further piece up to a stop string, which may have begun in an earlier one."""
        before = member.tokens.tolist()
        if not stop or not before:  # of a first piece, the endpoint has seen all
            return completion
        ids = [*before, *completion.token_ids.tolist()]
        end = StopStringScanner(self._text_so_far, stop).first_end(ids, len(before))
        if end is None:
            return completion
        kept, versions = end - len(before), completion.policy_versions
        return replace(
            completion,
            token_ids=completion.token_ids[:kept],
            logprobs=completion.logprobs[:kept],
            policy_versions=None if versions is None else versions[:kept],
            finish_reason=STOP,
        )

    def _part(
        self, record: GroupRecord, member: Member, answer: ChatAnswer, completion: Completion
    ) -> SampledPart:
        versions, sampled = completion.policy_versions, len(completion.token_ids)
        if versions is None:
            versions = np.full(sampled, self.log.policy.weight_version, np.int32)
        begins = not len(member.tokens)
        reason = completion.finish_reason
        if not sampled and reason in GOES_ON:
            raise BadResponse("a piece of a completion has no tokens")
        if begins and reason not in GOES_ON:
            member.text = completion.text
        prompt = answer.prompt_token_ids if begins else np.zeros(0, np.int32)
        return SampledPart(
            index=member.index,
            turn=member.turn,
            known=record.known_before(member, prompt) if begins else 0,
            messages=member.messages if begins else (),
            begun_again=record.begun_again.get(member.index),
            prompt=prompt,
            tokens=completion.token_ids,
            logprobs=completion.logprobs,
            versions=versions,
            digest=completion.parameters_digest or self.log.policy.parameters_digest,
            finish_reason=reason,
        )

    async def _commit(self, record: GroupRecord) -> None:
        """Commit what pieces added to a group, so that it can be gone on with."""
        async with record.lock:
            parts, record.pending = record.pending, []
            if not parts:  # another member's commit has them
                return
            maker = RolloutMaker(self.log.policy, record.request, datetime.now(UTC))
            group = record.request.group_of(tuple(map(maker.part, parts)))
            await asyncio.to_thread(self.log.go_on, group.group_id, group)

    def _completion(self, member: Member, stop: Sequence[str]) -> Completion:
        ids, versions = member.tokens, member.versions
        constant = (versions == self.log.policy.weight_version).all()
        # an endpoint's abort at the limit is that limit's end
        reason = LENGTH if member.finish_reason in GOES_ON else member.finish_reason
        text = member.text
        if text is None:  # without its end token, and cut before a stop string
            text, so_far = self.decode(ids.tolist(), reason), self._text_so_far(ids.tolist())
            if reason == STOP and stop and text == so_far:
                text = text_before_stop(self._text_so_far, ids.tolist(), stop)
        return Completion(
            text=text,
            token_ids=ids,
            logprobs=member.logprobs,
            finish_reason=reason,
            policy_versions=None if constant else versions,
            parameters_digest=member.digest,
        )

    def _text_so_far(self, ids: Sequence[int]) -> str:
        return self.decode(ids, LENGTH)


async def _prove_continuation(
    client: ChatClient, policy: ServedPolicy, request: GroupRequest
) -> None:
    """Ask an endpoint for a token, and for the next one. Raises InputError where it refuses."""
    token = replace(request.sampling_of(0), max_tokens=1)
    messages = request.example.messages or (Message(role="user", content="?"),)  # of an episode
    session = request.group_id
    begun = await client.chat(messages, 1, token, session=session)
    ids = np.concatenate([begun.prompt_token_ids, begun.completions[0].token_ids])
    try:
        answer = await client.chat(messages, 1, token, prompt_ids=ids, session=session)
        check_prompt(answer, ids)
    except REFUSALS as error:
        raise InputError(
            f"asynchrony.partial_tokens: the endpoint of {policy.model} does not go on from token "
            f"ids ({error}): expected one that takes them at /v1/chat/completions/tokens or "
            "/v1/completions (marin-rl serve, vLLM), SGLang's with inference.route sglang, or "
            "partial_tokens null"
        ) from error
