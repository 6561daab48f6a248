"""Launch: from a configuration, in a file or flags, to a training that runs, in threads or in processes."""
