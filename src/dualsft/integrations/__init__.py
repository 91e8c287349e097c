"""Work with other libraries: the rows of a run as data for other tools."""
