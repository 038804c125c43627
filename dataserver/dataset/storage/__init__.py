"""Where the files of a dataset lie: an interface, the registry of backends, and the file system of this machine."""
