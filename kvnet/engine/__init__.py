"""Where tokens become caches: the engine process, models on disk, sizes."""
