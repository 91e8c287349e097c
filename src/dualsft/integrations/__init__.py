"""Work with other libraries: Trainer and TRL, PEFT adapters, rows of a run as data, trackers."""
