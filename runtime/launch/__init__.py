"""The front's side of a run: devices, starting and watching ranks, talking to the leader. Never imports torch."""
