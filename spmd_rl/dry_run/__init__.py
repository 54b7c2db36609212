"""What a configuration would do on a cluster, worked out without one; no torch."""
