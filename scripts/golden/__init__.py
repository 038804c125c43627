"""The golden transcript of `protos/golden`: the datasets behind it, and how it is recorded."""
