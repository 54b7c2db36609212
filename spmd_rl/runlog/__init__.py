"""Keep what a run says: console, metrics, samples, checkpoints, its directory."""
