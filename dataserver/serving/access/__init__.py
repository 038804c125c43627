"""Who may do what: identities and their rights, checked for every call."""

from dataserver.serving.access.access import Access, require_right
from dataserver.serving.access.audit import Audit
from dataserver.serving.access.gate import Gate
from dataserver.serving.access.policy import EVERYBODY, Identity, Policy, Right, load_policy
from dataserver.serving.access.rates import ByteRate, ByteRates

__all__ = [
    "EVERYBODY",
    "Access",
    "Audit",
    "ByteRate",
    "ByteRates",
    "Gate",
    "Identity",
    "Policy",
    "Right",
    "load_policy",
    "require_right",
]
