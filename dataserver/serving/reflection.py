"""Server reflection, as grpc.reflection.v1 and under its older name v1alpha: tools ask for either.

The two differ in the name of the package alone, so that messages are the same on the wire; grpcio-reflection has only
the older one.
"""

from typing import Final

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

from dataserver.serving.call_admission import CallPool
from dataserver.serving.handlers import standard_handler

PACKAGE: Final = "grpc.reflection.v1"
_OLD_PACKAGE: Final = "grpc.reflection.v1alpha"
_FILE: Final = "grpc/reflection/v1/reflection.proto"


def enable_reflection(names: tuple[str, ...], server: grpc.Server, streams: CallPool) -> None:
    """Let a server describe the services of these full names, and the reflection services, in threads of `streams`."""
    _describe_v1()
    names = (*names, f"{PACKAGE}.ServerReflection", reflection.SERVICE_NAME)
    service, servicer = (
        reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
        reflection.ReflectionServicer(names),
    )
    nothing = reflection_pb2.ServerReflectionRequest()
    for name in (service.full_name, f"{PACKAGE}.ServerReflection"):
        server.add_generic_rpc_handlers((standard_handler(service, servicer, nothing, streams, name),))


def _describe_v1() -> None:
    """Put the descriptor of the newer package beside that of the older one, where it is not there yet."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_FILE)
    except KeyError:
        file = FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        file.name, file.package = _FILE, PACKAGE
        for message in file.message_type:
            for field in message.field:
                if field.type_name:  # setting it, even to "", would turn the field into one of a message type
                    field.type_name = _renamed(field.type_name)
        for service in file.service:
            for method in service.method:
                method.input_type, method.output_type = _renamed(method.input_type), _renamed(method.output_type)
        pool.Add(file)


def _renamed(name: str) -> str:
    return name.replace(f".{_OLD_PACKAGE}.", f".{PACKAGE}.")
