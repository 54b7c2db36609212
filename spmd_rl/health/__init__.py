"""Find a rank that makes no progress: heartbeats, the watchdog, the report that names it."""
