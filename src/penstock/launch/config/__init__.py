"""Configuration of `penstock train`: its keys, and how they are read, checked and written."""
