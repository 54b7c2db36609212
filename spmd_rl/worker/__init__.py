"""What every rank does when rank 0 tells a verb."""
