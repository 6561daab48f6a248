"""Resume: continue a training from its run folder."""
