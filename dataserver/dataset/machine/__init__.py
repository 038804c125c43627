"""What this machine allows: cores, memory, and processes that share out work."""
