"""The gateway: unmodified agents act through the policy, and every token is recorded.

`from verl_server.gateway import Gateway`. The way of a request:

1. `http/app.py` reads the request, `Access` in `http/routes.py` finds the session by its key.
2. A file in `dialects/` converts the body to a `TurnRequest` (`conversation.py`).
3. `sessions/session.py` finds the recorded path that the conversation continues (`history.py`), appends the tokens of
   the new messages, and lets the policy generate (`turns.py`).
4. `turn_text/splitting.py` splits the tokens of the turn, or those so far of a stream, and the dialect writes them.

`engines.py` has what generates, `health.py` what operators read.

`sessions/session_store.py` creates and ends sessions, `http/routes.py` has the API for that. At the end of a session,
`sessions/history.py` labels its conversations: the main conversation, its sub-agents, and side calls.
`programs.py` runs agent programs as samples of a `RolloutRunner`, each with a gateway of its own.
"""

from verl_server.gateway.engines import DiscoveredServers
from verl_server.gateway.gateway import Gateway
from verl_server.gateway.programs import ProgramAgentLoop, program_variables
from verl_server.gateway.sessions.history import TRAINED_KINDS, ConversationKind, label_conversations, trained_ends
from verl_server.gateway.sessions.session_store import SessionInfo

__all__ = [
    "TRAINED_KINDS",
    "ConversationKind",
    "DiscoveredServers",
    "Gateway",
    "ProgramAgentLoop",
    "SessionInfo",
    "label_conversations",
    "program_variables",
    "trained_ends",
]
