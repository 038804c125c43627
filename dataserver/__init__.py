"""CPU data servers: shards in, balanced steps of a multimodal training job out over gRPC. Never imports torch."""
