"""`python -m clients`: see `clients.cli`."""

from clients.cli import app

if __name__ == "__main__":
    app(prog_name="python -m clients")
