"""Sharding over ranks: FSDP2, gathering in buckets, offloading to host memory."""
