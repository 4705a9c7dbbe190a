"""The APIs that agents speak: each is one module, and one entry here."""

from april.agents.dialects.base import Dialect
from april.agents.dialects.chat import Chat
from april.agents.dialects.messages import Messages
from april.agents.dialects.responses import Responses

DIALECTS: list[type[Dialect]] = [Chat, Responses, Messages]
