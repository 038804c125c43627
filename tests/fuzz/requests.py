"""Odd requests for every method: valid ones with fields put to extremes, or with their bytes harmed."""

import copy
import json
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import grpc
from disttrain.v1 import admin_service_pb2, data_service_pb2, peer_service_pb2
from fuzz.mutation import mutated
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status

TIMEOUT_S: Final = 60
ACTIONS: Final = ("RETRY", "ANOTHER_SERVER", "CREATE_JOB", "GIVE_UP")
MOST_MESSAGES: Final = 8
"""Of a stream that are read before it is left."""
METHODS: Final[dict[str, MethodDescriptor]] = {
    f"{service.full_name}/{method.name}": method
    for file in (data_service_pb2, admin_service_pb2, peer_service_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "Drain"  # a valid one ends the server
}
NUMBERS: Final = (0, 1, 2, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63))
TEXTS: Final = (
    "",
    "vit",
    "x" * 5000,
    "\x00",
    "../../etc/passwd",
    "\u017f\u202e\U0001f600",
    "{}",
    "[" * 2000,
    "%s%n",
    "-0",
    "1e999",
)
VALUES: Final = (*NUMBERS, *TEXTS, None, True, 0.5, [], {}, [[]], {"": None}, "0.5", "999999999999999.9")


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it is kept: the method's name, a line break, the bytes of the message."""

    method: str
    body: bytes

    @classmethod
    def of(cls, data: bytes) -> "Request":
        """Read a kept request."""
        method, _, body = data.partition(b"\n")
        return cls(method.decode(), body)

    @property
    def data(self) -> bytes:
        """The form in which it is kept."""
        return self.method.encode() + b"\n" + self.body


def problem(channel: grpc.Channel, request: Request) -> str | None:
    """What is wrong with a server's answer; None if it is an answer, or an error that says what to do."""
    method = METHODS.get(request.method)
    try:
        if method is not None and method.server_streaming:
            call = channel.unary_stream(f"/{request.method}")(request.body, timeout=TIMEOUT_S)
            for _ in zip(range(MOST_MESSAGES), call, strict=False):
                pass
            call.cancel()
        else:
            channel.unary_unary(f"/{request.method}")(request.body, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return _problem_of(error, standard=request.method.startswith("grpc."))
    return None


def _problem_of(error: grpc.RpcError, standard: bool) -> str | None:
    if error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED):
        return f"{error.code()}: {error.details()}"
    status, info = rpc_status.from_call(error), error_details_pb2.ErrorInfo()
    if status is None or not status.details or not status.details[0].Unpack(info):
        return None if standard else f"{error.code()} without ErrorInfo: {error.details()}"
    return None if info.metadata["action"] in ACTIONS else f"the action is {info.metadata['action']!r}"


def odd(seed: Request, others: list[bytes], numbers: Random) -> Request:
    """An odd request made from a valid one.

    Args:
        seed: the valid one.
        others: messages to splice its bytes with.
        numbers: decides everything.
    """
    if numbers.random() < 0.3:
        return Request(seed.method, mutated(seed.body, others, numbers))
    message = GetMessageClass(METHODS[seed.method].input_type)()
    try:
        message.ParseFromString(seed.body)
    except DecodeError:
        return Request(seed.method, mutated(seed.body, others, numbers))
    if isinstance(message, data_service_pb2.GetOrCreateJobRequest) and numbers.random() < 0.9:
        message.job_spec_json = _odd_json(message.job_spec_json, numbers)
    else:
        for _ in range(numbers.randint(1, 3)):
            _put(message, numbers)
    return Request(seed.method, message.SerializeToString())


def _put(message: Message, numbers: Random) -> None:
    """Put one field to an odd value that its type can hold; of a message within, one of its fields."""
    if not message.DESCRIPTOR.fields:
        return
    field = numbers.choice(message.DESCRIPTOR.fields)
    if field.message_type is not None:
        inner = getattr(message, field.name)
        _put(inner.add() if field.is_repeated else inner, numbers)
        return
    value = numbers.choice(TEXTS if field.type == FieldDescriptor.TYPE_STRING else NUMBERS)
    try:
        if field.is_repeated:
            getattr(message, field.name).extend([value] * numbers.choice((1, 3, 1000)))
        else:
            setattr(message, field.name, value)
    except (ValueError, TypeError, OverflowError):  # the type does not hold it
        message.ClearField(field.name)


def _odd_json(text: str, numbers: Random) -> str:
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    if not isinstance(data, dict) or numbers.random() < 0.1:
        return mutated(text.encode(), [text.encode()], numbers).decode("utf-8", "ignore")
    for _ in range(numbers.randint(1, 3)):
        _change(data, numbers)
    return json.dumps(data)


def _change(data: Any, numbers: Random) -> None:
    """Change, leave out, or add something somewhere in a JSON value."""
    while isinstance(data, dict | list) and data:
        key = numbers.choice(list(data) if isinstance(data, dict) else range(len(data)))
        inner = data[key]
        if isinstance(inner, dict | list) and inner and numbers.random() < 0.8:
            data = inner
            continue
        match numbers.randrange(5):
            case 0:
                del data[key]
            case 1 if isinstance(data, list):
                data.extend(copy.deepcopy(data) * numbers.choice((1, 50)))
            case 2 if isinstance(data, dict):
                data[numbers.choice(TEXTS)] = copy.deepcopy(inner)
            case _:
                data[key] = copy.deepcopy(numbers.choice(VALUES))
        return
