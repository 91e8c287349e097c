"""`dualsft estimate`: memory, time and disk of every stage before anything runs."""
