"""The life of a run: launch, resume, watchdog."""
