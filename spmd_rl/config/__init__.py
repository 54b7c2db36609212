"""Settings, read strictly and checked at once; no torch."""
