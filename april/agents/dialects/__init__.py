"""The HTTP APIs that the gateway serves, one class and one module each."""

from april.agents.dialects.base import Dialect
from april.agents.dialects.chat import Chat
from april.agents.dialects.messages import Messages
from april.agents.dialects.responses import Responses

DIALECTS: list[type[Dialect]] = [Chat, Responses, Messages]
