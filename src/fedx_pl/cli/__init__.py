"""The command line: `main` parses, and each command has its module."""
