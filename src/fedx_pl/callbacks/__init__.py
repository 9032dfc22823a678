"""Callbacks around the rounds: health alarms, the dashboard, the progress display."""
