"""Operating system access: run folder paths, disk, memory, signals, progress."""
