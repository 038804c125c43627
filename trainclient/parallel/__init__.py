"""Process groups, communication brokers and the pipeline executor."""
