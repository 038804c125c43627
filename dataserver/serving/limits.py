"""Sizes of messages."""

from typing import Final

MAX_MESSAGE_BYTES: Final = 4 << 20
"""Of every message, sent or taken: what gRPC receives by default in every language."""

MAX_TRANSPORT_BYTES: Final = 2 * MAX_MESSAGE_BYTES
"""Of a request that still is received, to be refused with a reason; gRPC cuts larger ones off without one."""
