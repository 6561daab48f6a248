"""View: show a training in a terminal."""
