"""`dualsft compare`: a matrix of runs, and the tables and figures made from it."""
