"""The stream in other people's training loops. Each adapter imports one framework, and is imported by nobody here."""
