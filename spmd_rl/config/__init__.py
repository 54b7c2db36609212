"""What can be set, read strictly and checked at once; no torch."""
