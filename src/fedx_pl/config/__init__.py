"""Words to objects: the schema of all keys, how a configuration is composed, and what is built from it."""
