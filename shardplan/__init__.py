"""Pure planning and writing of shard sets: no torch, no GPU, no processes."""
