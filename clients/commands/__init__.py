"""The commands of `python -m clients`, one module a command or family of them; `clients.cli` puts them together."""
