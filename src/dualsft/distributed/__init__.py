"""Processes of a run: ranks and collectives, launching, failure detection."""
