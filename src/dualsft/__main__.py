"""Entry point of `python -m dualsft`."""

from dualsft.cli import main

if __name__ == "__main__":
    main()
