"""A rank's part of each verb that rank 0 sends."""
