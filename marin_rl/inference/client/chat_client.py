"""The base of every client of a policy: `chat` builds the request record, `answer` answers it.

Owns the signature that episodes are played against. A client that stands before another one passes
records on. Leaves out how a request is answered: by
endpoints (`policy_client` and the clients made of it), in pieces (`rollouts.partial`), or by
another program (`rollouts.relay`).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Int32

from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.inference.client.protocol import ChatRequest
from marin_rl.types import Message, Sampling

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class ChatClient(ABC):
    """Client of one policy, asked for by the id `model`."""

    model: str
    gives_ids = True  # each answer has the ids of its prompt and its completions

    async def chat(
        self,
        messages: Sequence[Message],
        n: int,
        sampling: Sampling,
        *,
        prompt_ids: Int32[np.ndarray, " P"] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        session: str = "",
        template_options: Mapping[str, Any] = NO_OPTIONS,
        stop_token_ids: Sequence[int] = (),
    ) -> ChatAnswer:
        """`n` samples of one conversation, checked.

        Requests of one `session` go to one endpoint while it can be, where a fleet has several: a
        dialogue's cache is there. `prompt_ids` are the exact ids to go on from; without them
        `messages` and `tools` are rendered, with `template_options`. `stop_token_ids` end a
        completion in addition to the endpoint's own.
        Raises EndpointUnavailable when every attempt failed, RequestRejected when the endpoint
        refuses the request, StalePolicy when it serves another model, BadResponse when its answer
        cannot be trained on; a client's `answer` says what else.
        """
        request = ChatRequest(
            model=self.model,
            messages=tuple(messages),
            n=n,
            sampling=sampling,
            prompt_ids=prompt_ids,
            tools=tuple(tools),
            session=session,
            template_options=template_options,
            stop_token_ids=tuple(stop_token_ids),
        )
        return await self.answer(request)

    @abstractmethod
    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Answer to a request of this client's model, with `request.n` completions."""
