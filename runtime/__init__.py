"""Running a shard set: launching ranks, loading, the forward pass, sampling, text."""
