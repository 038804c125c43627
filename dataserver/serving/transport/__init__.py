"""How microbatches reach the consumers of streams: as bytes over gRPC, or in memory that both sides see."""
