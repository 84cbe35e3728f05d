"""Asks a running Prometheus every query of the dashboard, as Grafana would, and says which have data.

    python3 deploy/grafana/ask.py http://127.0.0.1:9090

Without Grafana it shows that everything between a server and the dashboard works. What this machine does not have (a
GPU, the door) has no data. Exit code 1: Prometheus refuses a query, or has no data for any. Standard library alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).resolve().parent / "dashboards" / "encoder-lanes.json"
#: What the dashboard's variables stand for: everything.
_VARIABLES = {"$__rate_interval": "1m", "$instance": ".*", "$model": ".*"}


class QueryError(Exception):
    """Prometheus does not answer a query, and why."""


def queries(file: Path = FILE) -> Iterator[tuple[str, str]]:
    """Title of the panel and text of every query, its variables filled in; those of folded rows too."""
    for panel in json.loads(file.read_text(encoding="utf-8"))["panels"]:
        for graph in panel.get("panels", []) if panel["type"] == "row" else [panel]:
            for target in graph["targets"]:
                text = target["expr"]
                for name, value in _VARIABLES.items():
                    text = text.replace(name, value)
                yield graph["title"], text


def series_of(address: str, query: str) -> int:
    """How many series Prometheus gives for a query now.

    Args:
        address: of Prometheus, like http://127.0.0.1:9090.
        query: PromQL.

    Raises:
        QueryError: it cannot be reached, or refuses the query.
    """
    url = f"{address.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310
            return len(json.load(answer)["data"]["result"])
    except urllib.error.HTTPError as error:
        raise QueryError(f"Prometheus refuses {query!r}: {error.read().decode('utf-8', 'replace')[:300]}") from None
    except (OSError, ValueError, KeyError) as error:
        raise QueryError(f"{address} does not answer as Prometheus does ({error}): start it, or name it") from None


def main() -> int:
    """Ask, and print a line for each query."""
    parser = argparse.ArgumentParser(description="Ask Prometheus every query of the dashboard.")
    parser.add_argument("address", nargs="?", default="http://127.0.0.1:9090", help="of Prometheus")
    address = parser.parse_args().address
    asked = answered = 0
    try:
        for title, query in queries():
            found = series_of(address, query)
            asked, answered = asked + 1, answered + bool(found)
            print(f"{found:4} series  {title}")
    except QueryError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{answered} of {asked} queries have data")
    return 0 if answered else 1


if __name__ == "__main__":
    sys.exit(main())
