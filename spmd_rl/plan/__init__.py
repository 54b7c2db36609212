"""Work out, without a cluster, what a configuration would do on one; no torch."""
