"""What a dataset is made of: tar shards, their samples, and the metadata beside them."""
