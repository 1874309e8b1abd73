"""Many requests from a file, answered without a server: read, run as many at once as fit, write. No torch."""
