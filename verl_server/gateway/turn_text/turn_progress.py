"""`TurnProgress`: the tokens of a turn that is being generated, for the streams of the clients that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from verl_server.gateway.conversation import AssistantTurn, TurnDelta, TurnRequest
from verl_server.gateway.errors import ErrorKind, GatewayError
from verl_server.gateway.turn_text.token_decoder import bytes_of_tokens
from verl_server.gateway.turn_text.turn_splitter import TurnSplitter
from verl_server.trajectory.rendering.chat_renderer import ChatRenderer
from verl_server.types import Json


class TurnProgress:
    """The tokens of a turn that the engine has reported so far. Use it in one event loop.

    An engine reports tokens only if the turn will have them. It may report other tokens later if it had to begin
    again. Streams that have sent the text of the first tokens then wait for the end of the turn.
    """

    def __init__(
        self, renderer: ChatRenderer, preceding_ids: Sequence[int], request: TurnRequest, sampling_params: Json
    ) -> None:
        """`preceding_ids`: token ids before the turn. `sampling_params`: those of the turn."""
        self.renderer = renderer
        # The request itself is not kept: it has the whole conversation, and a session remembers hundreds of turns.
        self.has_logprobs, self._is_raw = request.logprobs, request.raw_prompt is not None
        self._allows_calls = request.allows_calls
        self._preceding_ids = preceding_ids
        stop: Any = sampling_params.get("stop") or ()
        self._stop = [stop] if isinstance(stop, str) else list(stop)
        self.token_ids = list[int]()
        self.logprobs = list[float]()
        self.num_restarts = 0
        """Number of times that the engine has reported other tokens than before."""
        self.node_id: int | None = None
        """Id of the recorded turn. Its request has its sample then, also if the turn cannot be read."""
        self._news = asyncio.Event()

    def add(self, start: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Take tokens from position `start` on, as `OnTokens` describes."""
        known = self.token_ids[start : start + len(token_ids)]
        if start > len(self.token_ids) or len(logprobs) != len(token_ids):
            return  # a generate function of somebody else: the text arrives at the end
        if known != list(token_ids[: len(known)]):
            self.num_restarts += 1
            del self.token_ids[start:], self.logprobs[start:]
            known = []
        self.token_ids += token_ids[len(known) :]
        self.logprobs += logprobs[len(known) :]
        self._tell_news()

    def end(self) -> None:
        """The turn has ended: forget its tokens, and let streams take the turn."""
        self.token_ids, self.logprobs = [], []
        self._tell_news()

    def _tell_news(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def wait_for_news(self) -> None:
        """Wait until there are new tokens, or the turn has ended."""
        await self._news.wait()

    def new_splitter(self) -> TurnSplitter:
        """Splits the turn for one stream."""
        return TurnSplitter(
            self.renderer, self._preceding_ids, self._stop, is_raw=self._is_raw, allows_calls=self._allows_calls
        )


class TurnDeltas:
    """The deltas of a turn for one stream, from the beginning of the turn."""

    def __init__(self, progress: TurnProgress) -> None:
        self._progress, self._splitter = progress, progress.new_splitter()
        self._num_restarts = progress.num_restarts
        self._num_split = 0
        """Number of tokens that the splitter has."""
        self._sent_ids = list[int]()
        self._reasoning, self._text = list[str](), list[str]()
        """Thoughts and text that were returned."""

    @property
    def has_news(self) -> bool:
        """Whether there are tokens that `take` has not looked at."""
        return self._num_restarts == self._progress.num_restarts and self._num_split < len(self._progress.token_ids)

    def take(self) -> TurnDelta | None:
        """The delta of the new tokens. None if nothing of the text is certain yet."""
        if not self.has_news:
            return None
        token_ids = self._progress.token_ids
        reasoning, text = self._splitter.add(token_ids[self._num_split :])
        self._num_split = len(token_ids)
        if not reasoning and not text:
            return None
        return self._delta(reasoning, text, token_ids, self._progress.logprobs)

    def take_rest(self, turn: AssistantTurn) -> TurnDelta:
        """The last delta of a turn. Raises GatewayError if the deltas before are no beginning of the turn."""
        reasoning, text = "".join(self._reasoning), "".join(self._text)
        is_beginning = turn.reasoning.startswith(reasoning) and turn.text.startswith(text)
        if not is_beginning or list(turn.token_ids[: len(self._sent_ids)]) != self._sent_ids:
            raise GatewayError(
                ErrorKind.OVERLOADED, "the engine had to generate the turn again; send the request again"
            )
        return self._delta(turn.reasoning[len(reasoning) :], turn.text[len(text) :], turn.token_ids, turn.logprobs)

    def _delta(self, reasoning: str, text: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> TurnDelta:
        """A delta with the tokens that were not sent yet."""
        num_sent = len(self._sent_ids)
        new_ids = token_ids[num_sent:]
        self._sent_ids += new_ids
        self._reasoning.append(reasoning)
        self._text.append(text)
        wants_tokens = self._progress.has_logprobs
        tokens = bytes_of_tokens(self._progress.renderer, token_ids, num_sent) if wants_tokens else ()
        return TurnDelta(reasoning, text, new_ids, logprobs[num_sent:], tokens)
