"""gRPC services, streams and prefetch."""
