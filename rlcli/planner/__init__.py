"""What a run will take, before it starts: memory by phase, time by phase, disk, and the largest sizes that fit.

Numbers alone: the model's shape comes from its config.json, the GPU from a table, and neither weights nor a device are
touched. docs/planning.md tells what each figure rests on.
"""
