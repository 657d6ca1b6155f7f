"""What a server serves after something went wrong: whole weights, an error, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

from verl_server.conformance.case import Trial
from verl_server.conformance.messages import CheckFailedError
from verl_server.conformance.reference import LOGPROB_LIMIT, NEW_TOKENS, PROMPTS, Weights
from verl_server.conformance.systems.base import Reply

WAIT_S = 2.0
"""Seconds without an answer after which a request counts as waiting."""
ANSWER_S = 30.0
"""Seconds after which a waiting request must have been answered, once weights are whole again."""
REFUSED, WAITS = "an error", "nothing, requests wait"


class ServedWeights:
    """One request, sent when the weights may not be whole, and what its answer tells."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[Reply] = self._pool.submit(trial.system.generate, PROMPTS[0], NEW_TOKENS)

    def describe(self, candidates: Mapping[str, Weights]) -> str:
        """What the server serves: the name of a candidate, `REFUSED` or `WAITS`.

        Raises CheckFailedError if the server generates with anything else.
        """
        try:
            reply = self._future.result(WAIT_S)
        except FutureTimeoutError:
            return REFUSED if self._future.done() else WAITS  # the system itself may raise a TimeoutError
        except Exception:  # noqa: BLE001 - boundary to the system under test: any error is a refusal
            return REFUSED
        gaps = {name: self._trial.reference.gap(weights, PROMPTS[0], reply) for name, weights in candidates.items()}
        for name, gap in gaps.items():
            if gap <= LOGPROB_LIMIT:
                return name
        text = " and ".join(f"by {gap:.1e} from {name}" for name, gap in gaps.items())
        raise CheckFailedError(f"the server generates with a mixture of weights: log probabilities differ {text}")

    def require_answer(self) -> None:
        """Raise CheckFailedError if the request is still waiting. Call this when the weights are whole again."""
        try:
            self._future.exception(ANSWER_S)
        except FutureTimeoutError:
            raise CheckFailedError(f"a waiting request was not answered within {ANSWER_S:g} s") from None
        finally:
            self._pool.shutdown(wait=False)
