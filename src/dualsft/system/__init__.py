"""What touches the operating system: run folder paths, disk, memory, signals, progress."""
