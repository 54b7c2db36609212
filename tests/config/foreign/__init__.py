"""Files in the way of other programs': their published keys, with values of their tables."""
