"""Says before a job starts whether it fits a TPU slice and how long its rounds can take at best.

The run's own programs are compiled ahead of time for a slice that is not there (`topology`), from shapes alone
(`shapes`, `programs`); what the compiler says of their memory and what their compiled text says of their traffic
(`hlo`) is set against the chip's published figures (`chips`). See docs/planner.md.
"""
