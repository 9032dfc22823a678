"""The command line: `commands` has all commands, and each has its own module."""
