"""What a run says of itself: intervals, head load, log, boards, alarms, tasks, journal."""
