"""The messages between the broker and its peers, a module per kind of peer, and their encoding (`codec`)."""

from april.util.versions import PROTOCOL as PROTOCOL
from april.wire.codec import *
from april.wire.message import *
from april.wire.sessions import *
from april.wire.training import *
from april.wire.work import *
