"""Work with other libraries: a delta as a PEFT adapter."""
