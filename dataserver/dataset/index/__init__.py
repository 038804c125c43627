"""The files that `dataserver index` writes beside shards, and how they are made and read."""
