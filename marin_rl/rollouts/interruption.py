"""Requests to end sampling early, where nothing is lost: between two pieces, or before a group.

Leaves out what is kept of unfinished groups (`partial`).
"""

import asyncio

from marin_rl.inference.client.answers import ChatAnswer
from marin_rl.inference.client.chat_client import ChatClient
from marin_rl.inference.client.protocol import ChatRequest


class Interrupted(Exception):
    """Sampling ended at the border of two pieces, or before a group began."""


class Interruption:
    """Request to end sampling at the next border of pieces, or also before the next group."""

    def __init__(self) -> None:
        self.requested = False
        self.between_groups = False

    def request(self, *, between_groups: bool = False) -> None:
        """Have all who sample end after the piece that they wait for.

        With `between_groups` those who sample whole completions begin no further group, too.
        """
        self.requested = True
        self.between_groups |= between_groups


class InterruptibleClient(ChatClient):
    """Client that begins no group once an interruption is requested between groups.

    As many requests as `in_flight_max` are under way at once, so that groups which wait have not
    begun. Those that have begun go on to their end.
    """

    def __init__(self, client: ChatClient, interruption: Interruption, in_flight_max: int) -> None:
        self.model, self.gives_ids = client.model, client.gives_ids
        self._client, self._interruption = client, interruption
        self._gate = asyncio.Semaphore(in_flight_max)
        self._begun = set[str]()

    async def answer(self, request: ChatRequest) -> ChatAnswer:
        """Ask as the client does. Raises Interrupted for a group that has not begun."""
        async with self._gate:
            if self._interruption.between_groups and request.session not in self._begun:
                raise Interrupted
            self._begun.add(request.session)  # the id of a group
            return await self._client.answer(request)
