"""The processes of a run: who they are, how they talk, how they are started."""
