"""How microbatches reach the consumers of streams: in shared memory, over data connections, or as chunks over gRPC."""
