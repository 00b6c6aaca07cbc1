"""What a run says of itself: metrics, head load, log, writers, alarms, tasks, events."""
