"""Run a process: start-up and refusal, signals, exit, the point a run resumes from."""
