"""View: a training as a terminal shows it."""
