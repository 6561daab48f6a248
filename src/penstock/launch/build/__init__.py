"""Build: from a configuration to a trainer that is ready to run."""
