"""Limits on the sizes of messages."""

from typing import Final

MAX_MESSAGE_BYTES: Final = 4 << 20
"""Largest message that is sent or taken: what gRPC receives by default in every language."""

MAX_TRANSPORT_BYTES: Final = 2 * MAX_MESSAGE_BYTES
"""Largest request that is received, in order to refuse it with a reason; gRPC cuts larger ones off without one."""
