"""What a run reports about itself: metrics, head load, log, writers, alarms, tasks, events."""
