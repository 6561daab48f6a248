"""Config: all that `penstock train` can be told, read, checked and written."""
