"""Entry point of `python -m builders`."""

from builders.cli import main

if __name__ == "__main__":
    main()
