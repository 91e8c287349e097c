"""`dualsft estimate`: estimate the memory, time and disk space of every stage before a run."""
