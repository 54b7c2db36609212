"""A run that is killed and goes on against the same run undisturbed, on a user's own settings and machine."""
