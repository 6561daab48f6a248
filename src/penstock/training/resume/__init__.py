"""Resume: go on from a run folder."""
