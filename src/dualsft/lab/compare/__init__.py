"""`dualsft compare`: run a matrix of configurations and make tables and figures of the results."""
