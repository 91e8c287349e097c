"""The methods that DualSFT is compared with: one table (`table.py`), and the methods by kind."""
